"""Checkpoints: writing, reading, mirroring and syncing them; the finished model."""
