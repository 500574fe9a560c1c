"""Adapters for inference servers, one file per engine, found by module name."""
