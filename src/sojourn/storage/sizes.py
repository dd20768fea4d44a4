"""Sizes of files for people."""

from __future__ import annotations


def format_size(size: float) -> str:
    """1.25 GB, 3.4 MB, 12.0 kB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
