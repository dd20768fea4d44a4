"""Sampling: the next token of each row of a batch from its logits.

The controls are those of transformers, applied in its order: logit bias, repetition penalty (over prompt and answer),
temperature, top-k, top-p, min-p. Frequency and presence penalties are OpenAI's, over the answer only; they come after
the repetition penalty.

A token is drawn with the Gumbel-max trick: the highest score plus noise wins. The noise of a token is a pure function
of seed, row, position and token id (`gumbel_noise`). So what a row draws does not depend on the rows beside it, the
device, or tokens drawn before, and rounding in the logits changes a draw only where two tokens are about to tie.

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

from sojourn.errors import RunFailed, UserError

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
    """`key`: from `row_key`. `position`: tokens generated so far."""

    params: SamplingParams
    prompt: Sequence[int]
    key: int
    position: int = 0


class Sampler:
    """Draws the next token of every row, and remembers what penalties need."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: Any) -> None:
        self._rows, self._device, self._vocab_size = list(rows), device, vocab_size
        params = [row.params for row in rows]
        self._temperature = self._column([p.temperature for p in params])
        self._is_greedy = all(p.temperature == 0 for p in params)
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._top_k = [p.top_k or vocab_size for p in params]
        self._top_p = [p.top_p for p in params]
        self._log_min_p = self._column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
        self._repetition = self._column([p.repetition_penalty for p in params])
        self._frequency = self._column([p.frequency_penalty for p in params])
        self._presence = self._column([p.presence_penalty for p in params])
        self._bias = self._logit_bias(params)
        self._seen = self._seen_tokens() if any(p.repetition_penalty != 1 for p in params) else None
        counted = any(p.frequency_penalty or p.presence_penalty for p in params)
        self._counts = torch.zeros(len(rows), vocab_size, device=device) if counted else None
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

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
            flags[[token for token in row.prompt if token < self._vocab_size]] = True
        return seen.to(self._device)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """One token a row. `logits_BV` in fp32; they may be changed in place."""
        scores_BV = self._penalize(logits_BV)
        best = scores_BV.max(-1)
        if not bool(torch.isfinite(best.values).all()):
            raise RunFailed(
                "the model's logits are not finite numbers (NaN or infinity): its weights are damaged, or its dtype "
                "overflows; check the model with: sojourn eval MODEL"
            )
        tokens_B = best.indices if self._is_greedy else self._draw(scores_BV, best.indices)
        if self._seen is not None:
            self._seen.scatter_(1, tokens_B[:, None], True)
        if self._counts is not None:
            self._counts.scatter_add_(1, tokens_B[:, None], torch.ones_like(self._temperature))
        for row in self._rows:
            row.position += 1
        return tokens_B

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        at = torch.tensor(rows, device=self._device)
        self._rows = [self._rows[row] for row in rows]
        self._top_k, self._top_p = [self._top_k[row] for row in rows], [self._top_p[row] for row in rows]
        for name in ("temperature", "log_min_p", "repetition", "frequency", "presence", "bias", "seen", "counts"):
            value = getattr(self, f"_{name}")
            setattr(self, f"_{name}", None if value is None else value.index_select(0, at))

    def _penalize(self, scores_BV: Tensor) -> Tensor:
        if self._bias is not None:
            scores_BV = scores_BV + self._bias
        if self._seen is not None:
            penalized = torch.where(scores_BV < 0, scores_BV * self._repetition, scores_BV / self._repetition)
            scores_BV = torch.where(self._seen, penalized, scores_BV)
        if self._counts is not None:
            scores_BV = scores_BV - self._frequency * self._counts - self._presence * (self._counts > 0)
        return scores_BV

    def _draw(self, scores_BV: Tensor, best_B: Tensor) -> Tensor:
        """Rows of temperature 0 keep `best_B`."""
        scores_BV = scores_BV / self._temperature.clamp(min=1e-30)
        keys = [_mix64(row.key + row.position) for row in self._rows]
        key_B1 = torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=self._device)[:, None]
        scores_BK, ids_BK = self._candidates(scores_BV)
        if ids_BK is not None:
            drawn_B1 = (scores_BK + gumbel_noise(key_B1, ids_BK.int())).argmax(-1, keepdim=True)
            tokens_B = ids_BK.gather(1, drawn_B1)[:, 0]
        else:
            rows = zip(*(t.split(1 if t.device.type == "cpu" else len(t)) for t in (scores_BK, key_B1)), strict=True)
            drawn = [gumbel_noise(key, self._token_ids).add_(scores).argmax(-1) for scores, key in rows]
            tokens_B = torch.cat(drawn)  # a row at a time stays in a CPU's cache
        return torch.where(self._temperature[:, 0] == 0, best_B, tokens_B) if self._any_greedy else tokens_B

    def _candidates(self, scores_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores and ids of the tokens to draw from; others are absent or have -inf. No ids: all tokens."""
        limits_k, limits_p = any(k < self._vocab_size for k in self._top_k), any(p < 1 for p in self._top_p)
        if not limits_k and not limits_p:
            return self._above_min_p(scores_BV), None
        most = max(self._top_k) + _MARGIN
        if most > _CANDIDATES:  # some row has no top_k, or a large one
            most = _CANDIDATES if all(p < 1 for p in self._top_p) else self._vocab_size
        for count in (most, self._vocab_size):
            scores_BK, ids_BK = scores_BV.topk(min(count, self._vocab_size), sorted=True)
            kept_BK, is_whole = self._keep_top(scores_BV, scores_BK)
            if is_whole:
                break
        return self._above_min_p(kept_BK), ids_BK

    def _keep_top(self, scores_BV: Tensor, scores_BK: Tensor) -> tuple[Tensor, bool]:
        """Applies top-k and top-p to the K highest scores; False where tokens beyond these may be kept, too."""
        count = scores_BK.shape[1]
        last_B1 = torch.tensor([min(k, count) - 1 for k in self._top_k], device=self._device)[:, None]
        kept_BK = scores_BK >= scores_BK.gather(1, last_B1)  # a token that ties with the k-th is kept
        scores_BK = scores_BK.masked_fill(~kept_BK, -math.inf)
        # Of what top-k keeps, those tokens whose more likely ones have less than top_p together.
        total_B1, has_all = scores_BK.logsumexp(-1, keepdim=True), [k <= count for k in self._top_k]
        if not all(has_all):
            has_all_B1 = torch.tensor(has_all, device=self._device)[:, None]
            total_B1 = torch.where(has_all_B1, total_B1, scores_BV.logsumexp(-1, keepdim=True))
        mass_BK = (scores_BK - total_B1).exp()
        before_BK = mass_BK.cumsum(-1) - mass_BK
        kept_BK &= before_BK < self._column(self._top_p)
        kept_BK[:, 0] = True
        is_whole = count == self._vocab_size or not bool(kept_BK[:, -1].any())
        return scores_BK.masked_fill(~kept_BK, -math.inf), is_whole

    def _above_min_p(self, scores_BK: Tensor) -> Tensor:
        if not bool((self._log_min_p > -math.inf).any()):
            return scores_BK
        return scores_BK.masked_fill(scores_BK < scores_BK.amax(-1, keepdim=True) + self._log_min_p, -math.inf)


def gumbel_noise(key_B1: Tensor, ids_BK: Tensor) -> Tensor:
    """Noise with a standard Gumbel distribution by key and token id (32-bit integers): -log(-log u) of a uniform u,
    which is a hash of both (lowbias32, by Chris Wellons)."""
    x = (ids_BK * _signed32(0x9E3779B9)) ^ key_B1
    shifted = torch.empty_like(x)  # in place throughout: new memory costs more than the arithmetic
    for bits, factor in ((16, 0x7FEB352D), (15, _signed32(0x846CA68B)), (16, 1)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        x ^= shifted.bitwise_and_(_WORD >> bits)  # as of an unsigned number
        x *= factor
    u = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)  # near 0, where likely winners are, it has all its bits
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: int) -> int:
    """splitmix64"""
    x = (x * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    x &= _WORD
    return x - 2**32 if x >= 2**31 else x
