"""What should change: policies and lease bookkeeping, pure."""
