"""What can be left out while reading: duplicates, other languages."""
