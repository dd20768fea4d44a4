"""What can end a run: signals, limits, out of memory, losses that are NaN or spike."""
