"""The shell around the pure core: clock, board, pollers, dispatcher, lifecycle, loop."""
