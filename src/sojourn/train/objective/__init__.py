"""Objectives: how a batch becomes a loss. `base.py` is the interface, `registry.py` chooses; one file per objective."""
