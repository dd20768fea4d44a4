"""Sojourn: train and serve language models on GPUs that you rent by the hour."""

import os
import time

__version__ = "0.1.0"
imported_at, imported_by = time.monotonic(), os.getpid()  # just after the start of that process; a fork is another
