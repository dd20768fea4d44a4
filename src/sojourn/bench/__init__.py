"""Measurements of this program against what it promises, on the machine at hand."""
