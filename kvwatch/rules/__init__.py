"""How bad it is: thresholds, hysteresis and staleness, pure."""
