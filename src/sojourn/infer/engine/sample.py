"""The sampled tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sojourn.infer.engine.request import Request, Token
from sojourn.infer.engine.scheduler import Part
from sojourn.infer.sampling import Sampler, SamplingRow


@dataclass
class Sampled:
    """Tokens on their way to the host. `counts`: of each part (by id), in the order of the parts."""

    tokens_L: Tensor
    counts: dict[int, int]
    ready: Any  # CUDA event
    scores: list[tuple[int, Tensor, Tensor, Tensor]]  # row, log probability of the token; the most likely ones

    def read(self) -> list[Token]:
        if self.ready is not None:
            self.ready.synchronize()
        tokens = [Token(token) for token in self.tokens_L.tolist()]
        for at, logprob, top, ids in self.scores:
            likely = tuple(zip(ids.tolist(), top.tolist(), strict=True))
            tokens[at] = Token(tokens[at].id, float(logprob), likely)
        return tokens


class StepSampler:
    """Keeps a `Sampler` while the same requests go on."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._sampler: Sampler | None = None
        self._rows: tuple[tuple[int, int], ...] = ()

    def __call__(self, logits_LV: Tensor, parts: Sequence[Part], last_tokens: Tensor) -> Sampled:
        rows = [(part.request, at) for part in parts if part.samples for at in range(1 + len(part.draft))]
        counts = {id(part): (1 + len(part.draft)) * part.samples for part in parts}
        logits_LV = _masked(logits_LV.float(), [request for request, _ in rows])
        if all(_is_argmax(request) for request, _ in rows):
            best = logits_LV.max(-1)
            tokens_L = torch.where(best.values.isfinite(), best.indices, -1).int()
        else:
            tokens_L = self._sample(logits_LV, rows).int()
        if self._device.type == "cuda":
            writes = torch.tensor([request.row for request, _ in rows], dtype=torch.int64).pin_memory()
            last_tokens.index_copy_(0, writes.to(self._device, non_blocking=True), tokens_L)
        scores = [_scores(logits_LV[at], tokens_L[at], r.logprobs) for at, (r, _) in enumerate(rows) if r.logprobs is not None]
        at_rows = [at for at, (r, _) in enumerate(rows) if r.logprobs is not None]
        found = [(at, *one) for at, one in zip(at_rows, scores, strict=True)]
        if self._device.type != "cuda":
            return Sampled(tokens_L, counts, None, found)
        host = torch.empty(tokens_L.shape, dtype=tokens_L.dtype, pin_memory=True)
        host.copy_(tokens_L, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Sampled(host, counts, ready, found)

    def _sample(self, logits_LV: Tensor, rows: list[tuple[Request, int]]) -> Tensor:
        key = tuple((id(request), ahead) for request, ahead in rows)
        if self._sampler is None or key != self._rows or any(ahead for _, ahead in rows):
            made = [
                SamplingRow(r.params, r.prompt, r.key, len(r.tokens) + r.unread + ahead, r.tokens) for r, ahead in rows
            ]
            self._sampler, self._rows = Sampler(made, self._vocab_size, self._device), key
        return self._sampler(logits_LV)


def _is_argmax(request: Request) -> bool:
    p = request.params
    return not (
        p.temperature or p.logit_bias or p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty
    )


def _masked(logits_LV: Tensor, requests: list[Request]) -> Tensor:
    if all(request.mask is None for request in requests):
        return logits_LV
    allowed = torch.ones(logits_LV.shape, dtype=torch.bool)
    for row, request in zip(allowed, requests, strict=True):
        if request.mask is not None:
            row[:] = False
            request.mask.fill(row)
    return logits_LV.masked_fill(~allowed.to(logits_LV.device), float("-inf"))


def _scores(logits_V: Tensor, token: Tensor, count: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities: of the token, and of the most likely ones with their ids."""
    logprobs = logits_V.log_softmax(-1)
    top = logprobs.topk(count or 1)
    kept = count or 0
    return logprobs[token.clamp(min=0)], top.values[:kept], top.indices[:kept]
