"""Offline users of the same core: demo, simulator, recorder, replay."""
