"""What ends a run or could: signals, limits, memory that runs out, losses that are no numbers."""
