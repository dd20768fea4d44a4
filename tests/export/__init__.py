"""Exports killed at random moments, and replayed in other programs with a real model; `make test-export`."""
