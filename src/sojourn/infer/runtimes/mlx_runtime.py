"""mlx-lm as a runtime: on a Mac its GPU, on Linux the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed
from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer

if TYPE_CHECKING:
    import numpy as np


class MlxRuntime(TokenizerRuntime):
    """`model` and `config`: as mlx-lm loads them."""

    def __init__(self, model: Any, config: dict[str, Any], tokenizer: Any) -> None:
        super().__init__("mlx", tokenizer, as_ids(config.get("eos_token_id")))
        self._model, self._quantization = model, config.get("quantization") or {}
        self._context = int(config.get("max_position_embeddings") or 2**20)

    def logits(self, ids: list[int]) -> np.ndarray | None:
        import mlx.core as mx
        import numpy as np

        return np.array(self._model(mx.array([ids]))[0].astype(mx.float32))

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        tokens: list[int] = []
        cache, step = make_prompt_cache(self._model), ids
        while len(tokens) < min(count, self._context - len(ids)):
            rows = self._model(mx.array([step]), cache=cache)
            tokens.append(int(rows[0, -1].astype(mx.float32).argmax().item()))
            if self.stops_at(tokens[-1]):
                break
            step = tokens[-1:]
        return tokens

    def weights(self) -> Iterator[tuple[str, Any]]:
        import mlx.core as mx
        import numpy as np
        import torch
        from mlx.utils import tree_flatten

        stored = dict(tree_flatten(self._model.parameters()))
        for name, value in stored.items():
            stem, _, kind = name.rpartition(".")
            if kind in ("scales", "biases"):
                continue
            scales, plain = stored.get(f"{stem}.scales"), value
            if scales is not None:
                bits, group = self._quantization["bits"], self._quantization["group_size"]
                plain = mx.dequantize(value, scales, stored[f"{stem}.biases"], group_size=group, bits=bits)
            yield name, torch.from_numpy(np.array(plain.astype(mx.float32)))

    def close(self) -> None:
        self._model = None


def unavailable() -> str:
    try:
        import mlx.core  # noqa: F401
        import mlx_lm.utils  # noqa: F401
    except ImportError:
        return "mlx-lm is not installed: pip install mlx-lm (on Linux also: pip install 'mlx[cpu]')"
    return ""


def open_model(path: Path) -> MlxRuntime:
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(path)
    except Exception as error:  # mlx-lm raises whatever its parts do
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RunFailed(f"{path}: mlx-lm cannot open it: {reason}") from None
    return MlxRuntime(model, config, open_tokenizer(path))
