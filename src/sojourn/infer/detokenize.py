"""Token ids to text while they are generated: a piece of text is given out once no later token can change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not a whole character
_MOST_PENDING = 8  # tokens of one character, and some more
_MOST_INCOMPLETE = 3  # a character of UTF-8 has at most 4 bytes; decoders write one sign a byte, or one for all


def make_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Ids to text without special tokens, exactly as the ids spell it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Detokenizer:
    """The text of one sequence. All pieces together are `decode` of all ids.

    A token's text may depend on its neighbours (a leading space, bytes of one character), so the last tokens are
    decoded again with each new one: `_window` are those tokens, of whose text `_given` was given out.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = ""
        self._fresh = 0  # where in the window the tokens begin that came since it last moved

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        incomplete = len(text) - len(text.rstrip(_INCOMPLETE))
        if not text.startswith(self._given):  # some decoders replace a whole run of bytes until its last character ends
            if len(self._window) - self._fresh <= _MOST_PENDING:
                return ""
            incomplete = 0  # it never will
        piece = text[len(self._given) : len(text) - min(incomplete, _MOST_INCOMPLETE)]
        self._given = text[: len(self._given) + len(piece)]
        if not incomplete and piece:
            self._move_window()
        return piece

    def _move_window(self) -> None:
        """Only to tokens that have a text, since it tells decoders that the sequence has started."""
        tail = self._window[self._fresh :]
        text = self._decode(tail)
        if text:
            self._window, self._given = tail, text
        self._fresh = len(self._window)

    def finish(self) -> str:
        """What was held back."""
        text = self._decode(self._window)
        piece, self._given = text[len(self._given) :], text
        return piece
