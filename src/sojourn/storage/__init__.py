"""Files that survive a kill: atomic writes, stage folders, mirrors, hub access (no torch)."""
