"""The tokenizer of a GGUF file, rebuilt from its metadata as llama.cpp does: special tokens are cut out of the text,
longest first; the rest is byte-level BPE with the named pre-tokenizer, or SentencePiece BPE by scores."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sojourn.data.tokenize.gguf_pre_tokenizers import BPE_MODEL, known, splitter
from sojourn.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "▁"
_KEPT_AFTER_SPACE = ("<unk>", "<s>", "<|endoftext|>")
SPECIAL_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # as llama.cpp spells them
_NAMES = ("bos", "eos", "eot", "eom", "unk", "sep", "pad", "cls", "mask")
# llama.cpp ends a generation at these whatever the file says.
STOPS_BY_TEXT = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<EOT>",
    "_<EOT>", "<|return|>", "<|call|>",
))  # fmt: skip
_C_WHITESPACE = " \t\n\v\f\r"
SENTENCEPIECE_MODEL = "llama"


@dataclass(frozen=True)
class SpecialToken:
    """`rstrip`: the whitespace after it is dropped."""

    id: int
    text: str
    rstrip: bool


class GgufTokenizer:
    """`metadata`: keys and values of the file."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self._ids = {text: number for number, text in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            raise UserError("two tokens of the vocabulary have the same text, which llama.cpp refuses to load")
        self._special = self._special_tokens()
        model = metadata.get("tokenizer.ggml.model")
        self._add_space = False
        if model == BPE_MODEL:
            self._encode: Callable[[str], list[int]] = self._byte_level()
        elif model == SENTENCEPIECE_MODEL:
            self._add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            self._scores: list[float] = metadata["tokenizer.ggml.scores"]
            self._encode = self._sentencepiece
        else:
            raise UserError(f"tokenizer.ggml.model: {model}: not a kind of tokenizer that Sojourn reads")

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text are found; none is added."""
        ids: list[int] = []
        after_special = True
        for part in self._partition(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = " " if self._add_space and after_special else ""
                ids += self._encode(prefix + part)
            after_special = isinstance(part, int)
        return ids

    def _special_tokens(self) -> list[SpecialToken]:
        types = self._metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)
        name = str(self._metadata.get("general.name", "")).lower()
        strips = "phi-3" in name or "phi3" in name  # llama.cpp goes by the model's name
        found = [
            SpecialToken(number, text, strips and text not in _KEPT_AFTER_SPACE)
            for number, text in enumerate(self.tokens)
            if types[number] in (UNKNOWN, CONTROL, USER_DEFINED) and text
        ]
        return sorted(found, key=lambda token: -len(token.text.encode()))

    def _partition(self, text: str) -> list[str | int]:
        parts: list[str | int] = [text] if text else []
        for token in self._special:
            if token.text not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                cut += [part] if isinstance(part, int) else _cut(part, token)
            parts = cut
        return parts

    def _byte_level(self) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer, models

        name = str(self._metadata.get("tokenizer.ggml.pre") or "default")
        pre = known(name)
        if pre is None:
            raise UserError(f"tokenizer.ggml.pre: {name}: not a pre-tokenizer that Sojourn knows")
        pairs = [_merge(merge) for merge in self._metadata["tokenizer.ggml.merges"]]
        merges = [pair for pair in pairs if {pair[0], pair[1], pair[0] + pair[1]} <= self._ids.keys()]
        tokenizer = Tokenizer(models.BPE(self._ids, merges, ignore_merges=pre.ignore_merges))
        tokenizer.pre_tokenizer = splitter(pre.patterns)
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)

    def _sentencepiece(self, text: str) -> list[int]:
        pieces = _merged(text.replace(" ", _SPACE), self._ids, self._scores)
        return [number for piece in pieces for number in self._piece_ids(piece)]

    def _piece_ids(self, piece: str) -> list[int]:
        found = self._ids.get(piece)
        if found is not None:
            return [found]
        return [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode() if f"<0x{byte:02X}>" in self._ids]


def special_names(metadata: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that chat templates use: bos_token, eos_token, …"""
    tokens, found = metadata["tokenizer.ggml.tokens"], {}
    for name in _NAMES:
        number = metadata.get(f"tokenizer.ggml.{SPECIAL_KEYS.get(name, name)}_token_id")
        if isinstance(number, int) and number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    return found


def _cut(text: str, token: SpecialToken) -> list[str | int]:
    after = rf"[{_C_WHITESPACE}]*" if token.rstrip else ""
    parts: list[str | int] = []
    at = 0
    for match in re.finditer(re.escape(token.text) + after, text):
        parts += [text[at : match.start()], token.id]
        at = match.end()
    return [part for part in (*parts, text[at:]) if part != ""]


def _merge(text: str) -> tuple[str, str]:
    at = text.find(" ", 1)
    return text[:at], text[at + 1 :]


def _merged(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[str]:
    """The pieces that remain when the neighbours that form the piece of highest score are merged, again and again."""
    pieces: list[str] = list(text)
    before = [index - 1 for index in range(len(pieces))]
    after = [*range(1, len(pieces)), -1]
    queue: list[tuple[float, int, int, str]] = []

    def add(left: int, right: int) -> None:
        if left < 0 or right < 0:
            return
        number = ids.get(pieces[left] + pieces[right])
        if number is not None:
            heapq.heappush(queue, (-scores[number], left, right, pieces[left] + pieces[right]))

    for left in range(len(pieces) - 1):
        add(left, left + 1)
    while queue:
        _, left, right, whole = heapq.heappop(queue)
        if not pieces[left] or not pieces[right] or pieces[left] + pieces[right] != whole:
            continue
        pieces[left], pieces[right] = whole, ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        add(before[left], left)
        add(left, after[left])
    return [piece for piece in pieces if piece]
