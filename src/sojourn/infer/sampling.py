"""Sampling: the next token of each row of a batch from its logits.

The controls are those of transformers, applied in its order: logit bias, repetition penalty (over prompt and answer),
temperature, top-k, top-p, min-p. Frequency and presence penalties are OpenAI's, over the answer only; they come after
the repetition penalty.

A token is drawn with the Gumbel-max trick in the form of an exponential race: the highest ratio of probability and
noise wins. The noise of a token is a pure function of seed, row, position and token id (`exponential_noise`). So what a
row draws does not depend on the rows beside it, the device, or tokens drawn before, and rounding in the logits changes
a draw only where two tokens are about to tie.

Shapes: B rows, V tokens of the vocabulary, K candidates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sojourn.errors import UserError
from sojourn.model.kernels.triton_support import supports_triton

_LEAST = 2.0**-20  # of temperature, top_p, repetition_penalty: less is 0 in fp32, or logits divided by it infinite
_CANDIDATES = 1024  # most likely tokens that top-k and top-p look at before they sort the whole vocabulary
_MARGIN = 16  # candidates beyond top_k, to see whether others tie with the last
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy decoding. `top_k` 0: all tokens. `stop`: strings before which the text ends. `n`: answers
    for each prompt. `seed`: None draws one."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        valid = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0; 1 is none"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 2, "from -2 to 2"),
            "presence_penalty": (abs(self.presence_penalty) <= 2, "from -2 to 2"),
            "n": (1 <= self.n <= 10_000, "from 1 to 10,000"),
        }
        for name, (is_valid, allowed) in valid.items():
            if not is_valid:
                raise UserError(f"{name} is {getattr(self, name)}; allowed: {allowed}")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= 100:
                raise UserError(f"logit_bias of token {token} is {bias}; allowed: from -100 to 100")
        if "" in self.stop:
            raise UserError("a stop string is empty; leave it out")
        if self.n > 1 and self.temperature == 0:
            raise UserError(f"n is {self.n}, but temperature 0 gives the same answer each time; set a temperature")


def row_key(seed: int, index: int, sample: int = 0) -> int:
    """What decides a row's noise: 64 bits."""
    text = f"{seed} {index} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass
class SamplingRow:
    """`key`: from `row_key`. `position`: tokens generated so far. `generated`: those, where penalties need them."""

    params: SamplingParams
    prompt: Sequence[int]
    key: int
    position: int = 0
    generated: Sequence[int] = ()


class Sampler:
    """Draws the next token of every row, and remembers what penalties need."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: Any) -> None:
        self._rows, self._device, self._vocab_size = list(rows), device, vocab_size
        params = [row.params for row in rows]
        self._bias = self._logit_bias(params)
        self._seen = self._seen_tokens() if any(p.repetition_penalty != 1 for p in params) else None
        counted = any(p.frequency_penalty or p.presence_penalty for p in params)
        self._counts = self._token_counts() if counted else None
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]
        self._set_columns()

    def _set_columns(self) -> None:
        """The controls of all rows on the device, so that a step copies as little as it can."""
        params = [row.params for row in self._rows]
        self._is_greedy = [p.temperature == 0 for p in params]
        self._greedy = self._to_device(torch.tensor(self._is_greedy))
        self._temperature = self._column([max(p.temperature, _LEAST) if p.temperature else 1.0 for p in params])
        self._repetition = self._column([min(max(p.repetition_penalty, _LEAST), 1 / _LEAST) for p in params])
        self._frequency = self._column([p.frequency_penalty for p in params])
        self._presence = self._column([p.presence_penalty for p in params])
        top_k = [p.top_k or self._vocab_size for p in params]
        self._most = min(max(top_k, default=1), self._vocab_size)
        self._limits_k = any(k < self._vocab_size for k in top_k)
        self._top_k = self._to_device(torch.tensor([min(k, self._vocab_size) for k in top_k]))[:, None]
        self._limits_p, self._all_limit_p = any(p.top_p < 1 for p in params), all(p.top_p < 1 for p in params)
        self._top_p = self._column([max(p.top_p, _LEAST) if p.top_p < 1 else 2.0 for p in params])
        self._limits_min_p = any(p.min_p for p in params)
        self._min_p = self._column([p.min_p for p in params])

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.float32))[:, None]

    def _to_device(self, values: Tensor) -> Tensor:
        """Without waiting for what the device is doing."""
        if torch.device(self._device).type != "cuda":
            return values.to(self._device)
        return values.pin_memory().to(self._device, non_blocking=True)

    def _logit_bias(self, params: Sequence[SamplingParams]) -> Tensor | None:
        if not any(p.logit_bias for p in params):
            return None
        bias = torch.zeros(len(params), self._vocab_size)
        for row, p in zip(bias, params, strict=True):
            for token, value in p.logit_bias.items():
                if not 0 <= token < self._vocab_size:
                    raise UserError(f"logit_bias: the model has no token {token}; it has {self._vocab_size:,}")
                row[token] = value
        return bias.to(self._device)

    def _seen_tokens(self) -> Tensor:
        seen = torch.zeros(len(self._rows), self._vocab_size, dtype=torch.bool)
        for flags, row in zip(seen, self._rows, strict=True):
            flags[[token for token in (*row.prompt, *row.generated) if token < self._vocab_size]] = True
        return seen.to(self._device)

    def _token_counts(self) -> Tensor:
        counts = torch.zeros(len(self._rows), self._vocab_size)
        for row_counts, row in zip(counts, self._rows, strict=True):
            for token in row.generated:
                row_counts[token] += 1
        return counts.to(self._device)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """One token a row, of logits in fp32; -1 where they are no finite numbers."""
        scores_BV = self._penalize(logits_BV)
        if all(self._is_greedy):
            tokens_B = self._best(scores_BV)
        elif not any(self._is_greedy):
            tokens_B = self._draw(scores_BV)
        else:
            tokens_B = torch.where(self._greedy, self._best(scores_BV), self._draw(scores_BV))
        if self._seen is not None:
            self._seen.scatter_(1, tokens_B[:, None].clamp(min=0), True)
        if self._counts is not None:
            self._counts.scatter_add_(1, tokens_B[:, None].clamp(min=0), torch.ones_like(self._temperature))
        for row in self._rows:
            row.position += 1
        return tokens_B

    def _penalize(self, scores_BV: Tensor) -> Tensor:
        if self._bias is not None:
            scores_BV = scores_BV + self._bias
        if self._seen is not None:
            penalized = torch.where(scores_BV < 0, scores_BV * self._repetition, scores_BV / self._repetition)
            scores_BV = torch.where(self._seen, penalized, scores_BV)
        if self._counts is not None:
            scores_BV = scores_BV - self._frequency * self._counts - self._presence * (self._counts > 0)
        return scores_BV

    def _best(self, scores_BV: Tensor) -> Tensor:
        best = scores_BV.max(-1)
        return torch.where(best.values.isfinite(), best.indices, -1)

    def _draw(self, scores_BV: Tensor) -> Tensor:
        probs_BV = (scores_BV / self._temperature).softmax(-1)
        keys = [_signed32(_mix64(row.key + row.position)) for row in self._rows]
        key_B1 = self._to_device(torch.tensor(keys, dtype=torch.int32))[:, None]
        limited = self._limits_k or self._limits_p
        if limited and probs_BV.is_cuda and supports_triton():
            from sojourn.infer.top_tokens import keep_top

            limits = (self._top_k if self._limits_k else None, self._top_p if self._limits_p else None)
            probs_BV, limited = keep_top(probs_BV, *limits), False
        if limited:
            probs_BK, ids_BK = self._most_likely(probs_BV)
            probs_BK = self._above_min_p(probs_BK)
            drawn_B1 = (probs_BK / exponential_noise(key_B1, ids_BK.int())).argmax(-1, keepdim=True)
            tokens_B1, prob_B1 = ids_BK.gather(1, drawn_B1), probs_BK.gather(1, drawn_B1)
        else:
            probs_BV = self._above_min_p(probs_BV)
            at_a_time = 1 if probs_BV.device.type == "cpu" else len(probs_BV)  # a row stays in a CPU's cache
            parts = zip(probs_BV.split(at_a_time), key_B1.split(at_a_time), strict=True)
            races = (probs / exponential_noise(key, self._token_ids) for probs, key in parts)
            tokens_B1 = torch.cat([race.argmax(-1, keepdim=True) for race in races])
            prob_B1 = probs_BV.gather(1, tokens_B1)
        return torch.where(prob_B1 > 0, tokens_B1, -1)[:, 0]

    def _most_likely(self, probs_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids of the tokens that top-k and top-p keep, and of others, whose probability is now 0."""
        count = self._most + _MARGIN
        if count > _CANDIDATES:  # some row has no top_k, or a large one
            count = _CANDIDATES if self._all_limit_p and not self._limits_k else self._vocab_size
        while True:
            count = min(count, self._vocab_size)
            probs_BK, ids_BK = probs_BV.topk(count)
            kept_BK = self._keep_top(probs_BK)
            if count == self._vocab_size or not bool((kept_BK[:, -1] > 0).any()):
                return kept_BK, ids_BK
            count = self._vocab_size  # tokens beyond these may be kept, too

    def _keep_top(self, probs_BK: Tensor) -> Tensor:
        if self._limits_k:
            last_B1 = probs_BK.gather(1, self._top_k.clamp(max=probs_BK.shape[1]) - 1)
            probs_BK = probs_BK.masked_fill(probs_BK < last_B1, 0.0)  # a token that ties with the k-th is kept
            if self._limits_p:  # of what top-k keeps
                total_B1 = torch.where(self._top_k < self._vocab_size, probs_BK.sum(-1, keepdim=True), 1.0)
                probs_BK = probs_BK / total_B1
        if self._limits_p:  # tokens whose more likely ones have less than top_p together
            before_BK = probs_BK.cumsum(-1) - probs_BK
            probs_BK = probs_BK.masked_fill(before_BK >= self._top_p, 0.0)
        return probs_BK

    def _above_min_p(self, probs_BK: Tensor) -> Tensor:
        if not self._limits_min_p:
            return probs_BK
        return probs_BK.masked_fill(probs_BK < probs_BK.amax(-1, keepdim=True) * self._min_p, 0.0)


def exponential_noise(key_B1: Tensor, ids_BK: Tensor) -> Tensor:
    """Numbers with an exponential distribution of mean 1 by key and token id (32-bit integers): -log(1 - u) of a
    uniform u, which is a hash of both."""
    x = (ids_BK * _signed32(0x9E3779B9)) ^ key_B1
    shifted = torch.empty_like(x)  # in place throughout: new memory costs more than the arithmetic
    for bits, factor in ((16, 0x7FEB352D), (15, _signed32(0x846CA68B))):
        x ^= torch.bitwise_right_shift(x, bits, out=shifted)
        x *= factor
    x ^= torch.bitwise_right_shift(x, 16, out=shifted)
    u = (x & 0x7FFFFFFF).float().add_(0.5).mul_(-(2.0**-31))  # near 0, where likely winners are, it has all its bits
    return u.log1p_().neg_()


def _mix64(x: int) -> int:
    """splitmix64"""
    x = (x * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    x &= _WORD
    return x - 2**32 if x >= 2**31 else x
