"""Engines: how the ranks of one run share its work, one file for each."""
