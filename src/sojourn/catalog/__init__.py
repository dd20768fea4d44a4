"""Facts about GPUs, platforms, prices and models as data, with typed readers (no torch)."""

from sojourn.catalog.facts import (
    Currency,
    Disk,
    Gpu,
    PlatformFacts,
    Price,
    currencies,
    gpus,
    peak_flops,
    platforms,
    prices,
)
from sojourn.catalog.names import gpu, prices_of
from sojourn.catalog.shapes import ModelSpec, model, models
from sojourn.catalog.tables import user_file

__all__ = [
    "Currency",
    "Disk",
    "Gpu",
    "ModelSpec",
    "PlatformFacts",
    "Price",
    "currencies",
    "gpu",
    "gpus",
    "model",
    "models",
    "peak_flops",
    "platforms",
    "prices",
    "prices_of",
    "user_file",
]
