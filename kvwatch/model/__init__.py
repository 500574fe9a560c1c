"""What the data looks like: frozen, slotted, keyword-only dataclasses; no I/O, no clock."""
