"""The sampled tokens of a step, and log probabilities where a request wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sojourn.infer.engine.batch import scores_prompt
from sojourn.infer.engine.request import Request, Token
from sojourn.infer.engine.scheduler import Part
from sojourn.infer.sampling import Sampler, SamplingRow


@dataclass
class Sampled:
    """Tokens on their way to the host: one for each part that samples, and one for each token of its draft."""

    tokens_L: Tensor
    ready: Any  # CUDA event
    scores: dict[int, Tensor]  # by row: log probability, then those of the most likely tokens, then their ids

    def read(self) -> list[Token]:
        if self.ready is not None:
            self.ready.synchronize()
        tokens = [Token(token) for token in self.tokens_L.tolist()]
        for row, scores in self.scores.items():
            tokens[row] = _token(tokens[row].id, scores)
        return tokens


class StepSampler:
    """Keeps a `Sampler` while the same requests go on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler: Sampler | None = None
        self._rows: list[tuple[Request, int]] = []  # held, so that no later request can be taken for one of them

    def __call__(self, logits_LV: Tensor, parts: Sequence[Part], last_tokens: Tensor) -> Sampled:
        logits_LV = logits_LV.float()
        if any(scores_prompt(part) for part in parts):
            logits_LV = _score_prompts(logits_LV, parts)
        rows = [(part.request, ahead) for part in parts if part.samples for ahead in range(1 + len(part.draft))]
        requests = [request for request, _ in rows]
        allowed_LV = _allowed(logits_LV, requests)
        if all(_is_argmax(request) for request in requests):
            best = allowed_LV.max(-1)
            tokens_L = torch.where(best.values.isfinite(), best.indices, -1).int()
        else:
            tokens_L = self._sample(allowed_LV, rows).int()
        scored = {row: one.logprobs for row, one in enumerate(requests) if one.logprobs is not None}
        scores = {row: _scores(logits_LV[row], tokens_L[row], count) for row, count in scored.items()}
        if self._device.type != "cuda":
            return Sampled(tokens_L, None, scores)
        where = torch.tensor([request.row for request in requests], dtype=torch.int64).pin_memory()
        last_tokens.index_copy_(0, where.to(self._device, non_blocking=True), tokens_L)
        host = torch.empty(tokens_L.shape, dtype=tokens_L.dtype, pin_memory=True)
        host.copy_(tokens_L, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Sampled(host, ready, scores)

    def _sample(self, logits_LV: Tensor, rows: list[tuple[Request, int]]) -> Tensor:
        if self._sampler is None or rows != self._rows or any(ahead for _, ahead in rows):
            made = [
                SamplingRow(r.params, r.prompt, r.key, len(r.tokens) + r.unread + ahead, r.tokens) for r, ahead in rows
            ]
            self._sampler, self._rows = Sampler(made, logits_LV.shape[1], self._device), rows
        return self._sampler(logits_LV)


def _is_argmax(request: Request) -> bool:
    p = request.params
    return not (p.temperature or p.logit_bias or request.has_penalties)


def _allowed(logits_LV: Tensor, requests: list[Request]) -> Tensor:
    """Logits without the tokens that grammars forbid."""
    if all(request.mask is None for request in requests):
        return logits_LV
    allowed = torch.ones(logits_LV.shape, dtype=torch.bool)
    for row, request in zip(allowed, requests, strict=True):
        if request.mask is not None:
            request.mask.fill(row)
    return logits_LV.masked_fill(~allowed.to(logits_LV.device), float("-inf"))


def _score_prompts(logits_LV: Tensor, parts: Sequence[Part]) -> Tensor:
    """Scores the prompts' tokens; the logits of tokens to sample."""
    sampled, at = [], 0
    for part in parts:
        count = part.size if scores_prompt(part) else (1 + len(part.draft)) * part.samples
        if scores_prompt(part):
            request = part.request
            for position in range(part.start, min(part.end, len(request.prompt) - 1)):
                logits_V, token = logits_LV[at + position - part.start], request.prompt[position + 1]
                scores = _scores(logits_V, torch.tensor(token), request.prompt_logprobs)
                request.prompt_scores.append(_token(token, scores))
        sampled += list(range(at + count - (1 + len(part.draft)) * part.samples, at + count))
        at += count
    return logits_LV[sampled]


def _scores(logits_V: Tensor, token: Tensor, count: int | None) -> Tensor:
    logprobs = logits_V.log_softmax(-1)
    top = logprobs.topk(count or 0)
    return torch.cat([logprobs[token.clamp(min=0)][None], top.values, top.indices.float()])  # ids are below 2^24


def _token(token: int, scores: Tensor) -> Token:
    logprob, *rest = scores.tolist()
    count = len(rest) // 2
    return Token(token, logprob, tuple(zip(map(int, rest[count:]), rest[:count], strict=True)))
