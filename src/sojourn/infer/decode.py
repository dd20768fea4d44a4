"""The decode loop: prefill, then one token a step for every row of a batch, with a KV cache. All generation is here.

Rows are padded on the left. Finished rows are dropped from the batch once half of it is finished.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from sojourn.infer.kv_cache import GrowingLayer, new_cache, select_rows
from sojourn.infer.sampling import Sampler, SamplingParams, SamplingRow, read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 16_384  # in one forward: bounds the memory of activations


@dataclass
class Row:
    """A prompt and what came of it. `key`: see `sampling.row_key`. `most`: tokens it may generate. `on_token` is called
    with each token but a stop token, and returns True where the row ends there."""

    prompt: Sequence[int]
    params: SamplingParams
    key: int
    most: int
    on_token: Callable[[int], bool] | None = None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False  # by a stop token or by `on_token`, not by `most`

    def add(self, token: int, stop_ids: frozenset[int]) -> bool:
        """Whether the row is finished."""
        self.tokens.append(token)
        self.stopped = token in stop_ids or (self.on_token is not None and self.on_token(token))
        return self.stopped or len(self.tokens) >= self.most


def supports_padding(model: PreTrainedModel) -> bool:
    """Whether rows of different lengths may share a batch: recurrent states would see the padding."""
    return all(isinstance(layer, (GrowingLayer, DynamicSlidingWindowLayer)) for layer in new_cache(model).layers)


def decode(
    model: PreTrainedModel,
    rows: Sequence[Row],
    stop_ids: frozenset[int],
    pad_id: int,
    cache: Any = None,
    on_step: Callable[[int], bool] | None = None,
) -> None:
    """Fills `tokens` of each row. `cache`: of the beginning of the only row's prompt. `on_step` is called after each
    token with the number of rows that it was generated for; it returns True to end here."""
    batch = _Batch(model, rows, pad_id, cache)
    with torch.no_grad():  # not inference_mode: a model in training must not keep inference tensors in its caches
        logits = batch.prefill()
        sampler = Sampler([SamplingRow(r.params, r.prompt, r.key) for r in rows], logits.shape[-1], logits.device)
        active = list(range(len(rows)))  # rows in the batch
        unfinished = set(active)
        while True:
            tokens = sampler(logits)
            count = len(unfinished)
            for index, token in zip(active, read_tokens(tokens), strict=True):
                if index in unfinished and rows[index].add(token, stop_ids):
                    unfinished.remove(index)
            if (on_step is not None and on_step(count)) or not unfinished:
                return
            if 2 * len(unfinished) <= len(active):
                kept = [at for at, index in enumerate(active) if index in unfinished]
                active = [active[at] for at in kept]
                sampler.select(kept)
                tokens = batch.select(kept, tokens)
            logits = batch.step(tokens)


class _Batch:
    """What the model is called with."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], pad_id: int, cache: Any) -> None:
        self._model, self._cache = model, new_cache(model) if cache is None else cache
        self._done = self._cache.get_seq_length()
        device = next(model.parameters()).device
        width = max(len(row.prompt) for row in rows)
        ids = [[pad_id] * (width - len(row.prompt)) + list(row.prompt) for row in rows]
        lengths = torch.tensor([[len(row.prompt)] for row in rows])
        self._ids = torch.tensor(ids, device=device)
        self._positions = (torch.arange(width) - (width - lengths)).clamp(min=0).to(device)
        self._next_positions = lengths.to(device)
        self._mask: Tensor | None = None  # for the prompt and all tokens to come; none where nothing is padded
        if bool((lengths < width).any()):
            padding = torch.arange(width + max(row.most for row in rows)) < width - lengths
            self._mask = (~padding).long().to(device)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        takes = inspect.signature(base.forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def prefill(self) -> Tensor:
        rows, width = self._ids.shape
        chunk = max(1, _PREFILL_TOKENS // rows)
        logits = None
        for start in range(self._done, width, chunk):
            part = slice(start, min(start + chunk, width))
            logits = self._forward(self._ids[:, part], self._positions[:, part])
        assert logits is not None  # noqa: S101 (a prompt has a token that is not in the cache)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        logits = self._forward(tokens[:, None], self._next_positions)
        self._next_positions = self._next_positions + 1
        return logits

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The last position's logits, in fp32."""
        self._done += ids.shape[1]
        mask = None if self._mask is None else self._mask[:, : self._done]
        found = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True,
            **self._only_last,
        )  # fmt: skip
        return found.logits[:, -1].float()

    def select(self, rows: list[int], tokens: Tensor) -> Tensor:
        """Goes on with these rows only; returns their tokens."""
        at = torch.tensor(rows, device=tokens.device)
        select_rows(self._cache, rows, tokens.device)
        self._next_positions = self._next_positions.index_select(0, at)
        self._mask = None if self._mask is None else self._mask.index_select(0, at)
        return tokens.index_select(0, at)
