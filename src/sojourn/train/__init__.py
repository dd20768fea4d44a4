"""Training: the loop, its step, optimizer, checkpoints, guards and meters."""
