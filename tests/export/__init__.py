"""Runs that are killed, or whose disk fails, at every possible moment; `make test-kill`."""
