"""Runs that are killed, or whose disk fails, at every moment there is; `make test-kill`."""
