"""Kernels as operations that a compiler takes for granted and does not look into.

`torch.library.custom_op` does the same, with several times as much Python around each call: small models wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sojourn", "FRAGMENT")


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function under `schema`; `fake` makes results of the right shapes without computing them."""

    def register(function: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sojourn::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.sojourn, name).default

    return register


def differentiable(name: str, remember: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """`remember` saves what `backward` needs."""
    torch.library.register_autograd(f"sojourn::{name}", backward, setup_context=remember, lib=_LIBRARY)
