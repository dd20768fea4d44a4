"""The first documents as the model sees them: decoded from the very tokens and loss mask that training gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sojourn.data.encode import Encoder
from sojourn.data.sources.chunks import Chunk
from sojourn.data.sources.document import Document
from sojourn.data.tokenize.chat_template import Span

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_CHARACTERS = 20_000  # of an example in a report: some texts are as long as a book
_MAX_TOKENS = 20_000


@dataclass(frozen=True)
class Example:
    """A document, or the first part of one that is split, as text; `spans` are what the model is trained to predict."""

    where: str
    text: str
    spans: list[Span]


def make_examples(encoder: Encoder, tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[Example]:
    for document in documents:
        encoded = encoder(Chunk(document.where, "documents", [1], [document]))
        count = len(encoded.lengths)
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        names = (" chosen", " rejected") if document.rejected else (f" (part 1 of {count})" if count > 1 else "",)
        for name, start, length in zip(names, starts.tolist(), encoded.lengths.tolist(), strict=False):
            tokens = slice(start, start + min(length, _MAX_TOKENS))
            text, spans = _decode(tokenizer, encoded.ids[tokens].tolist(), encoded.mask[tokens])
            yield Example(f"{document.where}{name}", text, spans)


def _decode(tokenizer: Tokenizer, ids: list[int], mask: np.ndarray) -> tuple[str, list[Span]]:
    """The text of the tokens, and where in it the trained ones are."""

    def characters_before(token: int) -> int:
        return min(len(tokenizer.decode(ids[:token], skip_special_tokens=False)), _MAX_CHARACTERS)

    text: str = tokenizer.decode(ids, skip_special_tokens=False)[:_MAX_CHARACTERS]
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    spans = [
        (characters_before(start), characters_before(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
    return text, [(start, end) for start, end in spans if start < end]
