"""What the samples mean: one pure file per derived quantity."""
