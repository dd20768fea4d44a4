"""Documents to token ids and a loss mask: 1 on every token that the model is to learn to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from sojourn.data.chat import END_OF_TEXT, render
from sojourn.data.document import Document
from sojourn.data.tokenizer import token_id
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 1000


@dataclass(frozen=True)
class Encoded:
    document: Document
    ids: np.ndarray
    mask: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer, train_on: str) -> Iterator[Encoded]:
    stream = iter(documents)
    end_of_text = token_id(tokenizer, END_OF_TEXT)
    while batch := list(islice(stream, _BATCH)):
        rendered = [render(d.messages) if d.is_chat else (d.text, [(0, len(d.text))]) for d in batch]
        encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for document, (_, spans), encoding in zip(batch, rendered, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            if document.is_chat and train_on == "assistant":
                starts, ends = np.array(encoding.offsets, dtype=np.int64).T
                mask = np.zeros(len(ids), dtype=np.uint8)
                for start, end in spans:  # a token that reaches into a span belongs to it, as in transformers
                    mask[(ends > start) & (starts < end)] = 1
                if not mask.any():
                    raise UserError(f"{document.where}: nothing in this example is trained on")
            else:
                mask = np.ones(len(ids), dtype=np.uint8)
            if not document.is_chat:
                ids = np.append(ids, np.uint32(end_of_text))
                mask = np.append(mask, np.uint8(1))
            yield Encoded(document, ids, mask)
