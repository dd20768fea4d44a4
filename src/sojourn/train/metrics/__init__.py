"""What a run shows and notes of itself."""
