"""What a machine with a real NVIDIA GPU shows, in one script of under four minutes."""
