"""Our own engine as a runtime for models that do not fit in memory: logits layer by layer from the files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer
from sojourn.infer.streamed import streamed_logits
from sojourn.infer.weight_source import FolderWeights, WeightSource

if TYPE_CHECKING:
    import numpy as np


class StreamedRuntime(TokenizerRuntime):
    """No greedy text: each token would read all weights again."""

    def __init__(self, weights: WeightSource) -> None:
        stops = weights.generation_config or weights.config
        super().__init__("streamed", open_tokenizer(weights.tokenizer_folder), as_ids(stops.get("eos_token_id")))
        self._weights = weights

    def logits(self, ids: list[int]) -> np.ndarray | None:
        rows: np.ndarray = streamed_logits(self._weights, [ids])[0].float().numpy()
        return rows

    def logits_at(self, batch: list[list[int]], positions: list[list[int]]) -> list[np.ndarray] | None:
        """All at once: the weights are read once."""
        found = streamed_logits(self._weights, batch)
        return [rows[wanted].float().numpy() for rows, wanted in zip(found, positions, strict=True)]


def unavailable() -> str:
    return ""


def open_model(path: Path) -> StreamedRuntime:
    return StreamedRuntime(FolderWeights(path))
