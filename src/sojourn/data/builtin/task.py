"""A task: a question with one right answer, and whether a reply gives it."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from typing import Literal

from sojourn.data.builtin.words import Language

Split = Literal["train", "held_out"]
_HELD_OUT_OF_256 = 26  # one key in ten


@dataclass(frozen=True)
class Task:
    """`key` is what the question is about, whatever its wording: all tasks of one key are on one side of the split."""

    family: str
    language: Language
    key: str
    prompt: str
    answer: str

    @property
    def split(self) -> Split:
        return split_of(self.family, self.key)


def split_of(family: str, key: str) -> Split:
    digest = hashlib.blake2b(f"{family}:{key}".encode(), digest_size=8).digest()
    return "held_out" if digest[0] < _HELD_OUT_OF_256 else "train"


def verify(task: Task, reply: str) -> bool:
    """Exact, but for space around it, one closing full stop, runs of space, and full-width digits and signs."""
    return _plain(reply) == _plain(task.answer)


def _plain(words: str) -> str:
    joined = " ".join(unicodedata.normalize("NFKC", words).split())
    return joined[:-1].rstrip() if joined.endswith((".", "。")) else joined
