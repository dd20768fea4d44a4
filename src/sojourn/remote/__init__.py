"""The rented box: hosts, SSH transport, sync, bootstrap, supervisor, platforms (no torch)."""
