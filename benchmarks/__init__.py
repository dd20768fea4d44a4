"""Measurements that are run from the repository: they are not part of the installed package."""
