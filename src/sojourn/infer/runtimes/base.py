"""`Runtime`: a program that has opened a model. The parity gate asks each one the same questions."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from typing_extensions import Self

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


class Runtime:
    """Subclasses override what their program can answer; None means that it cannot.

    A module in this package has `unavailable() -> str` (empty, or why it cannot run here and what to type) and
    `open_model(path: Path) -> Runtime`, where `path` is an export's folder or a single file. `open_model` raises
    `UserError` or `RunFailed` in one line. It may have `refuses(path) -> str`: empty, or why this model cannot be
    opened on this machine, such as too little memory.
    """

    name: str

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written in `text` are always recognised; `add_special_tokens`: the ones that the
        tokenizer puts around a plain text, too."""
        raise NotImplementedError

    def render(self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True) -> str | None:
        """The chat in the model's template. None where the model or the program has none. A template that rejects
        the chat raises `ValueError`."""
        return None

    def render_ids(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True
    ) -> list[int] | None:
        """For programs that give only the token ids of a rendered chat. Otherwise as `render`."""
        return None

    def stops_at(self, token: int) -> bool | None:
        """Whether generation ends after this token."""
        return None

    def logits(self, ids: list[int]) -> np.ndarray | None:
        """[len(ids), vocabulary] in fp32, teacher-forced: row i predicts token i + 1."""
        return None

    def logits_at(self, batch: list[list[int]], positions: list[list[int]]) -> list[np.ndarray] | None:
        """Some rows of the logits of several texts. Overridden where all texts at once are cheaper."""
        found = []
        for ids, wanted in zip(batch, positions, strict=True):
            rows = self.logits(ids)
            if rows is None:
                return None
            found.append(rows[wanted])
        return found

    def top_logprobs(self, ids: list[int], count: int) -> list[dict[int, float]] | None:
        """For programs that give no logits: per position at least the `count` likeliest tokens with their log
        probabilities; row i predicts token i + 1, and a row that the program does not give is empty."""
        return None

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        """At most `count` new tokens by argmax, without penalties; a stop token is the last one."""
        return None

    def weights(self) -> Iterable[tuple[str, Any]] | None:
        """The weights as torch tensors under transformers' names, dequantized, in any order."""
        return None

    def close(self) -> None:
        """Frees memory, ends child processes. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
