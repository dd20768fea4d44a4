"""The run folder: layout, status, metrics and events (no torch)."""
