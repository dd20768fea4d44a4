"""What is kept of a run: checkpoints, when and how they are written and read back, copies, the finished model."""
