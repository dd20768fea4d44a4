"""Filters while reading: duplicates, and documents in other languages."""
