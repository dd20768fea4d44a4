"""`builtin:text`: a stream of short texts for pretraining."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sojourn.data.builtin.phrases import LANGUAGES, Language
from sojourn.data.builtin.stable_random import StableRandom
from sojourn.data.builtin.text_types import TEXT_TYPES
from sojourn.data.sources.document import Document

_TWO_TEXTS = 0.3  # share of documents that hold two texts of one type, so that lengths vary


def text(min_bytes: int, seed: int = 0, languages: Sequence[Language] = LANGUAGES) -> Iterator[Document]:
    """Documents until their UTF-8 bytes reach `min_bytes`; a longer stream begins with the shorter one."""
    random = StableRandom(seed, "text")
    types = tuple(TEXT_TYPES.items())
    size = number = 0
    while size < min_bytes:
        number += 1
        language = random.choice(languages)
        name, write = random.choice(types)
        content = write(random, language)
        if random.chance(_TWO_TEXTS):
            content = f"{content}\n\n{write(random, language)}"
        size += len(content.encode())
        yield Document(f"builtin:text:{number} ({language}, {name})", text=content)
