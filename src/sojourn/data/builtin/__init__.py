"""Data that Sojourn makes itself: a text corpus and instructions with verifiable answers."""

from sojourn.data.builtin.corpus import text
from sojourn.data.builtin.families import FAMILIES
from sojourn.data.builtin.instructions import instructions
from sojourn.data.builtin.task import Split, Task, split_of, verify
from sojourn.data.builtin.words import LANGUAGES, Language

VERSION = 1  # raise it when the same seed gives other data: prepared data is then made anew

__all__ = [
    "FAMILIES",
    "LANGUAGES",
    "VERSION",
    "Language",
    "Split",
    "Task",
    "instructions",
    "split_of",
    "text",
    "verify",
]
