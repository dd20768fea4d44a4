"""Weights that a layer dequantizes or casts can be kept while it is used several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")
KEEPS_WEIGHT = {"keeps_weight": False, "kept_weight": None}  # attributes of classes whose modules can keep one


@contextmanager
def kept_weights(module: nn.Module) -> Iterator[None]:
    """In it, what modules in `module` make by `keep` is made once."""
    modules: list[Any] = [one for one in module.modules() if hasattr(one, "kept_weight")]
    for one in modules:
        one.keeps_weight = True
    try:
        yield
    finally:
        for one in modules:
            one.keeps_weight, one.kept_weight = False, None


def keep(module: Any, make: Callable[[], T]) -> T:
    if module.kept_weight is not None:
        kept: T = module.kept_weight
        return kept
    made = make()
    if module.keeps_weight:
        module.kept_weight = made
    return made
