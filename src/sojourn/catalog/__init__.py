"""Facts about GPUs and platforms as data, with typed readers (no torch)."""

from sojourn.catalog.facts import Gpu, PlatformFacts, Price, gpus, peak_flops, platforms, prices
from sojourn.catalog.names import gpu
from sojourn.catalog.tables import user_file

__all__ = ["Gpu", "PlatformFacts", "Price", "gpu", "gpus", "peak_flops", "platforms", "prices", "user_file"]
