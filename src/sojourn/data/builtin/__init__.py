"""Built-in data: a text corpus (`builtin:text`) and questions with verifiable answers (`builtin:instructions`).

Both are in English and Chinese and a pure function of a seed: the same bytes on every machine, pinned by hashes in the
tests. `en/` and `zh/` hold the prose, the modules here draw from it. A question is held out by a hash of its key (its
numbers, its facts), so no wording of a held-out question is ever trained on; only the family `about`, which has few
facts, holds out wordings instead. `sojourn eval` asks held-out questions.
"""

from sojourn.data.builtin.corpus import text
from sojourn.data.builtin.families import FAMILIES
from sojourn.data.builtin.instructions import Question, Split, instructions, is_correct, split_of
from sojourn.data.builtin.phrases import LANGUAGES, Language

VERSION = 1  # part of the artefact hash: raise it when the same seed gives other data

__all__ = [
    "FAMILIES",
    "LANGUAGES",
    "VERSION",
    "Language",
    "Question",
    "Split",
    "instructions",
    "is_correct",
    "split_of",
    "text",
]
