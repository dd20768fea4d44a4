"""Sojourn: train and serve language models on GPUs that you rent by the hour."""

import time

__version__ = "0.1.0"
imported_at = time.monotonic()  # just after the start of a process
