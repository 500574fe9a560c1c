"""What is true now: every module here reads the world and may block; none decides."""
