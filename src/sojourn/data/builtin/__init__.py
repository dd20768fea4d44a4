"""Data that Sojourn makes itself: a text corpus and instructions with verifiable answers."""
