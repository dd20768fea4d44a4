"""A KV cache that grows in place: transformers' own copies all keys and values for every new token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_MIN_CAPACITY = 64  # tokens


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views of buffers with room for more tokens. A full buffer is replaced by one of twice the
    size."""

    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
            self._key_buffer, self._value_buffer = _with_room(key_states, 0), _with_room(value_states, 0)
            self.keys, self.values = self._key_buffer[..., :0, :], self._value_buffer[..., :0, :]
        length, new = self.keys.shape[-2], key_states.shape[-2]
        if length + new > self._key_buffer.shape[-2]:
            self._key_buffer, self._value_buffer = (
                _with_room(states, 2 * length + new) for states in (key_states, value_states)
            )
            self._key_buffer.narrow(-2, 0, length).copy_(self.keys)
            self._value_buffer.narrow(-2, 0, length).copy_(self.values)
        self._key_buffer.narrow(-2, length, new).copy_(key_states)
        self._value_buffer.narrow(-2, length, new).copy_(value_states)
        self.keys = self._key_buffer.narrow(-2, 0, length + new)
        self.values = self._value_buffer.narrow(-2, 0, length + new)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        if length:
            self._key_buffer = self._key_buffer.index_select(0, indices)
            self._value_buffer = self._value_buffer.index_select(0, indices)
            self.keys = self._key_buffer[..., :length, :]
            self.values = self._value_buffer[..., :length, :]


def _with_room(states: Tensor, tokens: int) -> Tensor:
    """A buffer for at least so many tokens of the shape of `states`."""
    *outer, new, width = states.shape
    return states.new_empty((*outer, max(tokens, new + _MIN_CAPACITY), width))


def new_cache(model: PreTrainedModel) -> Any:
    """An empty cache. Layers of other kinds (sliding window, linear attention) are transformers' own."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def crop_cache(cache: Any, length: int) -> bool:
    """Drops all but the first `length` tokens. False where a layer has forgotten them: make a new cache then."""
    surplus = cache.get_seq_length() - length
    if surplus < 0 or not all(isinstance(layer, GrowingLayer) for layer in cache.layers):
        return False
    for layer in cache.layers:
        if surplus and layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return True


def select_rows(cache: Any, rows: list[int], device: Any) -> None:
    cache.batch_select_indices(torch.tensor(rows, device=device))
