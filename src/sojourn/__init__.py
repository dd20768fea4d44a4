"""Sojourn: train and serve language models on GPUs that you rent by the hour."""

__version__ = "0.1.0"
