"""The engine's steps computed by a transformers model itself: for models that are no `Decoder` (read_decoder.py), for
devices without kernels of ours, and for samples in training, where weights change and must not be copied.

The tokens of all requests are one row for the model; only attention is ours, over the blocks of the KV cache
(`PagedForward`). It is compared with the model's own before it is used. Models that fail, because their layers keep
states of other kinds or have attention of their own, get one request at a time, with their own cache (`SerialForward`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.infer.engine.batch import StepBatch, build_arrays, order_parts, to_device
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.infer.engine.engine import DecodeLoop, EngineOptions, StepForward, blocks_for
from sojourn.infer.engine.forward import known_ids
from sojourn.infer.engine.ops_torch import TorchOps, zeros
from sojourn.infer.engine.request import Request
from sojourn.infer.engine.scheduler import Part
from sojourn.infer.read_decoder import has_length_dependent_rope
from sojourn.infer.sampling import SamplingParams
from sojourn.machine.out_of_memory import is_oom

_NAME = "sojourn_paged"
_STEP_TOKENS = 2048
_WHOLE_PROMPT_TOKENS = 16_384  # where a prompt in pieces would not be the same
_PAGED_LAYERS = {"full_attention", "sliding_attention"}
_CHECKED_TOKENS, _MOST_CHECKED = 24, 512
_TOLERANCE_FP32, _TOLERANCE_HALF = 1e-3, 0.2  # relative; rounding alone makes several percent in bf16


def open_transformers_loop(model: Any, max_rows: int, context: int, memory: int) -> DecodeLoop:
    """`model` must be in eval mode, and keeps our attention: set its attention implementation again before other uses.
    `memory`: bytes for the KV cache. `options.max_rows` of the loop is 1 where requests cannot share a step."""
    device = next(model.parameters()).device
    blocks = blocks_for(_kv_bytes_per_token(model), memory, max_rows, context)
    limit = _rope_limit(model)
    forward = open_paged_forward(model, blocks, limit)
    if forward is not None:
        step = _STEP_TOKENS if limit is None else _WHOLE_PROMPT_TOKENS
        options = EngineOptions(max_rows, step, context, blocks, prefix_cache=limit is None)
        return DecodeLoop(forward, device, options)
    options = EngineOptions(1, _WHOLE_PROMPT_TOKENS, context, blocks, prefix_cache=False)
    return DecodeLoop(SerialForward(model), device, options)


def generate_tokens(model: Any, requests: Sequence[Request]) -> None:
    """Fills `tokens` of each request, with a KV cache for just these."""
    longest = max((len(request.prompt) + request.most for request in requests), default=1)
    loop = open_transformers_loop(model, max(1, len(requests)), longest, 1 << 62)
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()


class PagedForward:
    """`limit`: tokens of a text up to which others may share a call with it; None: always."""

    def __init__(self, model: Any, blocks: int, limit: int | None = None) -> None:
        self._model, self._blocks, self._limit = model, blocks, limit
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}
        self._ops, self._keeps = TorchOps(), "logits_to_keep" in _forward_parameters(model)

    def warm_up(self, last_tokens: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        together = self._limit is None or all(part.end <= self._limit for part in parts)
        return torch.cat([self._compute(some, last_tokens) for some in ([parts] if together else [[p] for p in parts])])

    def _compute(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        batch = to_device(build_arrays(parts, {}), last_tokens.device)
        ids_T = known_ids(batch.ids_T, last_tokens).long()
        keep = {"logits_to_keep": batch.logit_rows_L} if self._keeps else {}
        logits: Tensor = self._model(
            input_ids=ids_T[None], position_ids=batch.positions_T[None].long(), use_cache=False,
            paged=(self, batch, batch.slots_T.long()),
            **keep,
        ).logits[0]  # fmt: skip
        return logits if self._keeps else logits[batch.logit_rows_L]

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, batch: StepBatch, slots_T: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        query_THD, key_TKD = query_THD.to(value_TKD.dtype), key_TKD.to(value_TKD.dtype)  # RoPE may have promoted them
        if layer not in self._caches:
            new = [zeros((self._blocks * BLOCK, *x.shape[1:]), x.dtype, x.device) for x in (key_TKD, value_TKD)]
            self._caches[layer] = (new[0], new[1])
        cache = self._caches[layer]
        cache[0].index_copy_(0, slots_T, key_TKD)
        cache[1].index_copy_(0, slots_T, value_TKD)
        return self._ops.attention(query_THD, cache, batch, spec).unflatten(1, (spec.heads, -1))


def _attention(
    module: nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, mask: Any = None, **given: Any
) -> tuple[Tensor, None]:
    """As transformers calls it, with one row."""
    if given.get("paged") is None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} does not support a paged KV cache")
    forward, batch, slots_T = given["paged"]
    heads, head_dim = query_BHTD.shape[1], query_BHTD.shape[3]
    spec = AttentionSpec(
        heads, key_BKTD.shape[1], head_dim, given.get("scaling") or head_dim**-0.5, given.get("sliding_window"),
        0, None, None, None, None, 0.0, given.get("softcap"), given.get("s_aux"),
    )  # fmt: skip
    rows = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
    return forward.attend(module.layer_idx, *rows, batch, slots_T, spec)[None], None


class SerialForward:
    """One request at a time, from its first token on."""

    def __init__(self, model: Any) -> None:
        self._model, self._takes = model, _forward_parameters(model)
        self._cache: Any = None

    def warm_up(self, last_tokens: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        from transformers import DynamicCache

        (part,) = parts
        if part.start == 0:
            self._cache = DynamicCache(config=self._model.config)
        ids_T = known_ids(torch.tensor(part.ids(), device=last_tokens.device), last_tokens).long()
        positions_T = torch.arange(part.start, part.end, device=last_tokens.device)
        cache = "past_key_values" if "past_key_values" in self._takes else "cache_params"
        given = {"position_ids": positions_T[None], "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in self._takes}
        found = self._model(input_ids=ids_T[None], use_cache=True, **{cache: self._cache}, **given)
        logits: Tensor = found.logits[0, -1:]
        return logits if part.samples else logits[:0]


def open_paged_forward(model: Any, blocks: int, limit: int | None) -> PagedForward | None:
    """None where the model does not compute with it what it computes by itself."""
    from transformers import AttentionInterface

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = getattr(base.config.get_text_config(), "layer_types", None) or ()
    if not (set(layers) <= _PAGED_LAYERS and base._can_set_attn_implementation()):
        return None
    AttentionInterface.register(_NAME, _attention)
    before = base.config._attn_implementation
    with torch.no_grad():
        texts = _texts(base)
        expected = torch.stack([model(input_ids=ids[None], use_cache=False).logits[0, -1] for ids in texts])
        base.set_attn_implementation(_NAME)
        try:
            if _is_close(_paged_logits(model, texts), expected):
                return PagedForward(model, blocks, limit)
        except Exception as error:  # other people's code, called as it was not meant to be
            if is_oom(error):
                raise
    base.set_attn_implementation(before)
    return None


def _texts(base: Any) -> list[Tensor]:
    """Two, longer than a small sliding window."""
    config = base.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    length = window + 8 if _CHECKED_TOKENS < window + 8 <= _MOST_CHECKED else _CHECKED_TOKENS
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    ids = torch.arange(2 * length, device=next(base.parameters()).device) * 7919 % min(config.vocab_size, 1000)
    return list(ids.split(length))


def _paged_logits(model: Any, texts: list[Tensor]) -> Tensor:
    """Of the last tokens: two requests in a batch, the first one's prompt in halves, the second's last token alone."""
    length = len(texts[0])
    per_text = -(-length // BLOCK)
    forward: StepForward = PagedForward(model, 1 + 2 * per_text)
    first, second = (Request("", ids.tolist(), SamplingParams(), 0, 1) for ids in texts)
    first.blocks, second.blocks = list(range(1, 1 + per_text)), list(range(1 + per_text, 1 + 2 * per_text))
    none = torch.zeros(2, dtype=torch.int32, device=texts[0].device)
    half, last = length // 2, length - 1
    forward(order_parts([Part(first, 0, half, False), Part(second, 0, last, False)]), none)
    return forward([Part(second, last, length, True), Part(first, half, length, True)], none).flip(0)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE_FP32 if expected.dtype == torch.float32 else _TOLERANCE_HALF
    return bool((found.float() - expected.float()).norm() <= tolerance * expected.float().norm())


def _rope_limit(model: Any) -> int | None:
    config = model.config.get_text_config()
    if not has_length_dependent_rope(config):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)


def _forward_parameters(model: Any) -> frozenset[str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(inspect.signature(base.forward).parameters)


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", None) or 1
    heads = getattr(config, "num_key_value_heads", None) or queries
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    itemsize: int = next(model.parameters()).dtype.itemsize
    return int(2 * config.num_hidden_layers * heads * head_dim * max(2, itemsize))
