"""Change the world: one file per action, found by module name."""
