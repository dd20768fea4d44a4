"""Measures training: a ladder of our own rows and the peers on the same work, each loss curve compared."""
