"""kvwatch watches GPU memory and KV caches together, warns early and acts reversibly."""

__version__ = "0.1.0"
