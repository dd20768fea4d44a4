"""The tensors of one step: all tokens of its parts, one after another.

Shapes: T tokens, S sequences, B blocks of the longest one, L logits; Q tokens of one sequence, C of its context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.scheduler import Part


@dataclass
class Prompts:
    """Of sequences with several tokens: where each one's tokens begin (cu_seqlens); keys and values that they see."""

    query_starts: Tensor
    kv_starts: Tensor
    kv_slots_C: Tensor


@dataclass
class Group:
    """Sequences with equally many tokens here. `slots_SC`: where their keys and values are. `distance_SQC`: of each of
    these to each token, below 0 where it comes later."""

    tokens: slice
    slots_SC: Tensor
    distance_SQC: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What to add to scores: of positions beyond the sliding window, and of later tokens, -inf."""
        if window not in self._masks:
            seen = self.distance_SQC >= 0
            seen = seen if window is None else seen & (self.distance_SQC < window)
            self._masks[window] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, -math.inf
            )
        return self._masks[window]


@dataclass
class StepBatch:
    """`ids_T` below 0: see `Request.token_at`. `slots_T`: where each token's keys and values go. `starts_S1`: the first
    token of each sequence, and the end (cu_seqlens). `context_S`: tokens of a sequence up to its last one here.
    `logit_rows_L`: tokens whose logits are wanted. `adapter_T`: index of the adapter, 0 for none; None where nobody has
    one. The first `decodes` sequences have one token each."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    starts_S1: Tensor
    context_S: Tensor
    block_table_SB: Tensor
    logit_rows_L: Tensor
    adapter_T: Tensor | None
    prompts: Prompts | None
    decodes: int
    max_query: int
    max_context: int

    @cached_property
    def groups(self) -> list[Group]:
        """What one call of a plain attention can take: all sequences with one token, then each of the others."""
        starts, context = self.starts_S1.tolist(), self.context_S.tolist()
        bounds = [0, *range(max(1, self.decodes), len(context) + 1)]
        groups = []
        for first, end in pairwise(bounds):
            tokens = slice(starts[first], starts[end])
            length = -(-max(context[first:end]) // BLOCK) * BLOCK  # kernels want masks of even sizes
            at_C = torch.arange(length, device=self.starts_S1.device)
            blocks_SC = self.block_table_SB[first:end, at_C // BLOCK]
            positions_SQ = self.positions_T[tokens].unflatten(0, (end - first, -1))
            groups.append(Group(tokens, blocks_SC * BLOCK + at_C % BLOCK, positions_SQ[..., None] - at_C))
        return groups


def order_parts(parts: Sequence[Part]) -> list[Part]:
    """Single tokens first."""
    return sorted(parts, key=lambda part: part.size > 1)


def build_arrays(parts: Sequence[Part], adapters: dict[str, int], padded: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a step in int32, by name. Rows up to `padded` write into block 0 and are not looked at."""
    count, extra = len(parts), max(0, padded - len(parts))
    sizes = np.array([part.size for part in parts] + [1] * extra, np.int32)
    starts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    blocks = [part.request.blocks for part in parts]
    table = np.zeros((len(sizes), max(map(len, blocks), default=1)), np.int32)
    for row, own in zip(table, blocks, strict=False):
        row[: len(own)] = own
    begins = np.array([part.start for part in parts] + [0] * extra, np.int32)
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    positions = (np.arange(starts[-1]) - starts[sequence] + begins[sequence]).astype(np.int32)
    ids = np.zeros(starts[-1], np.int32)
    ids[: starts[count]] = [token for part in parts for token in part.ids()]
    arrays = {
        "ids": ids,
        "positions": positions,
        "slots": table[sequence, positions // BLOCK] * BLOCK + positions % BLOCK,
        "starts": starts,
        "context": begins + sizes,
        "table": table,
        "logit_rows": np.concatenate([_logit_rows(part, starts[at]) for at, part in enumerate(parts)]),
    }
    decodes = sum(part.size == 1 for part in parts)
    if decodes < count:
        context = arrays["context"][decodes:count]
        arrays["query_starts"] = starts[decodes : count + 1] - starts[decodes]
        arrays["kv_starts"] = np.concatenate([[0], np.cumsum(context)])
        slots = [_slots(table[decodes + at], length) for at, length in enumerate(context)]
        arrays["kv_slots"] = np.concatenate(slots)
    if any(part.request.adapter for part in parts):
        of_part = [adapters[part.request.adapter] if part.request.adapter else 0 for part in parts] + [0] * extra
        arrays["adapter"] = np.array(of_part)[sequence]
    return arrays


def pad_prompts(arrays: dict[str, np.ndarray], tokens: int) -> None:
    """Adds a prompt nobody asked for, so that there are so many tokens; it is computed in block 0."""
    more = tokens - len(arrays["ids"])
    if not more:
        return
    for name in ("ids", "positions", "slots", "kv_slots", *(["adapter"] if "adapter" in arrays else [])):
        arrays[name] = np.pad(arrays[name], (0, more))
    for name in ("starts", "query_starts", "kv_starts"):
        arrays[name] = np.append(arrays[name], arrays[name][-1] + more)
    arrays["context"] = np.append(arrays["context"], more)
    arrays["table"] = np.pad(arrays["table"], ((0, 1), (0, 0)))


def _slots(table: np.ndarray, length: int) -> np.ndarray:
    positions = np.arange(length)
    return table[positions // BLOCK] * BLOCK + positions % BLOCK


def _logit_rows(part: Part, start: int) -> np.ndarray:
    """The last token known and its draft; all tokens where the prompt's log probabilities are wanted."""
    first = part.end - part.start - 1 if part.samples else part.size
    return np.arange(start + (0 if scores_prompt(part) else first), start + part.size)


def scores_prompt(part: Part) -> bool:
    """Whether log probabilities of the prompt's tokens are wanted, and not known yet."""
    request = part.request
    return request.prompt_logprobs is not None and part.start + 1 > len(request.prompt_scores) and not request.tokens


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> StepBatch:
    """One copy for all arrays. Each starts at a multiple of 16 bytes: Triton compiles kernels anew for others."""
    starts = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays.values()]).tolist()
    flat = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    parts = {name: slice(at, at + array.size) for at, (name, array) in zip(starts, arrays.items(), strict=False)}
    for name, array in arrays.items():
        flat.numpy()[parts[name]] = array.ravel()
    flat = flat.to(device, non_blocking=True)
    found = {name: flat[parts[name]].view(array.shape) for name, array in arrays.items()}
    sizes = np.diff(arrays["starts"])
    decodes = len(sizes) - (len(arrays["query_starts"]) - 1 if "query_starts" in arrays else 0)
    prompts = Prompts(found["query_starts"], found["kv_starts"], found["kv_slots"]) if "kv_slots" in found else None
    return StepBatch(
        found["ids"], found["positions"], found["slots"], found["starts"], found["context"], found["table"],
        found["logit_rows"], found.get("adapter"), prompts, decodes, int(sizes.max(initial=0)),
        int(arrays["context"].max(initial=0)),
    )  # fmt: skip
