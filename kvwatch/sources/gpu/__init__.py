"""Sources of GPU facts."""
