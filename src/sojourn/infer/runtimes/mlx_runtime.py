"""mlx-lm as a runtime: on a Mac its GPU, on Linux the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed
from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer

if TYPE_CHECKING:
    import numpy as np


class MlxRuntime(TokenizerRuntime):
    """`model`: of mlx-lm."""

    def __init__(self, model: Any, tokenizer: Any, stop_ids: set[int], context: int) -> None:
        super().__init__("mlx", tokenizer, stop_ids)
        self._model, self._context = model, context

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
    context = int(config.get("max_position_embeddings") or 2**20)
    return MlxRuntime(model, open_tokenizer(path), as_ids(config.get("eos_token_id")), context)
