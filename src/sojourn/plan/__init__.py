"""Memory, time and money before paying (no torch)."""
