"""The whole journey on this machine, with the built-in data."""
