"""Doors: one file a verb. Parse, call, print; no logic."""
