"""RunConfig: what a run is, read from presets, YAML files, overrides and flags (no torch)."""
