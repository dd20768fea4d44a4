"""Registers kernels as custom ops, which torch.compile treats as opaque.

`torch.library.custom_op` does the same with several times the Python overhead per call, which dominates small models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sojourn", "FRAGMENT")


def custom_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function under `schema`; `fake` returns empty results of the right shapes."""

    def register(function: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sojourn::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.sojourn, name).default

    return register


def register_autograd(name: str, setup_context: Callable[..., Any], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"sojourn::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
