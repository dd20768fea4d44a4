"""A step computed one operation after another."""

from __future__ import annotations

import torch
from torch import Tensor

from sojourn.infer.engine.adapters import Adapters
from sojourn.infer.engine.batch import build_arrays, to_device
from sojourn.infer.engine.forward import Forward
from sojourn.infer.engine.scheduler import Part


class PlainForward:
    def __init__(self, forward: Forward, adapters: Adapters) -> None:
        self._forward, self._adapters = forward, adapters

    def warm_up(self, last_tokens: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        batch = to_device(build_arrays(parts, self._adapters.indices), self._forward.decoder.device)
        if any(part.request.unread for part in parts):
            batch.ids_T = known_ids(batch.ids_T, last_tokens)
        return self._forward(batch)


def known_ids(ids_T: Tensor, last_tokens: Tensor) -> Tensor:
    """Token ids, where those below 0 name a row of `last_tokens`."""
    return torch.where(ids_T < 0, last_tokens[(-1 - ids_T).clamp(min=0)], ids_T)
