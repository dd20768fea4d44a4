"""A tokenizer's vocabulary as GGUF stores it: texts, types, and scores or merges."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.data.tokenize.gguf_pre_tokenizers import BPE_MODEL
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.errors import UserError
from sojourn.infer.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SENTENCEPIECE_MODEL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from sojourn.storage.files import read_json_object

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0  # llama.cpp never merges into these
_SENTENCEPIECE_BPE = 2  # ModelType of sentencepiece_model.proto
_SPACE = "▁"


@dataclass
class Vocabulary:
    """`scores`: of SentencePiece. `merges`: of byte-level BPE. `left_out`: tokens beyond the model's embedding."""

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ignore_merges: bool = False


@dataclass(frozen=True)
class AddedToken:
    id: int
    text: str
    special: bool
    rstrip: bool = False
    lstrip: bool = False


def read_vocabulary(
    definition: dict[str, Any], model_file: Path | None, added: list[AddedToken], size: int
) -> Vocabulary:
    """`definition`: tokenizer.json; `model_file`: tokenizer.model, if there is one. `size`: rows of the model's
    embedding; ids without a token get a placeholder."""
    model = definition["model"]
    if model_file is not None:
        vocabulary = _from_sentencepiece(model_file, size)
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        vocabulary = _from_merges(model, size)
    elif model.get("type") == "BPE" and _is_byte_level(definition):
        vocabulary = _from_byte_level(model, size)
    else:
        kind = model.get("type", "none")
        raise UserError(
            f"GGUF: llama.cpp has no tokenizer like this one ({kind}); it has byte-level BPE and SentencePiece BPE; "
            "export it with --to hf"
        )
    for token in added:
        _place(vocabulary, token, size)
    _make_unique(vocabulary)
    return vocabulary


def added_tokens(bundle: TokenizerBundle, folder: Path) -> list[AddedToken]:
    """Of every file that may name some; tokenizer.json has the last word."""
    found: dict[int, AddedToken] = {}
    for text, number in read_json_object(folder / "added_tokens.json").items():
        if isinstance(number, int):
            found[number] = AddedToken(number, text, special=False)
    for key, value in (bundle.settings.get("added_tokens_decoder") or {}).items():
        if isinstance(value, dict) and str(key).isdecimal():
            found[int(key)] = _added(int(key), value)
    if bundle.fast_file is not None:
        for number, token in bundle.tokenizer.get_added_tokens_decoder().items():
            found[number] = AddedToken(number, token.content, token.special, token.rstrip, token.lstrip)
    return [found[number] for number in sorted(found)]


def _added(number: int, value: dict[str, Any]) -> AddedToken:
    flags = {name: bool(value.get(name)) for name in ("special", "rstrip", "lstrip")}
    return AddedToken(number, str(value["content"]), **flags)


def read_definition(bundle: TokenizerBundle) -> dict[str, Any]:
    """tokenizer.json, also of a tokenizer that has only tokenizer.model."""
    found: dict[str, Any] = json.loads(bundle.tokenizer.to_str())
    return found


def _is_byte_level(definition: dict[str, Any]) -> bool:
    steps = definition.get("pre_tokenizer") or {}
    return any(step.get("type") == "ByteLevel" for step in steps.get("pretokenizers", [steps]))


def _blank(model: str, size: int) -> Vocabulary:
    return Vocabulary(model, [f"[PAD{number}]" for number in range(size)], [UNUSED] * size)


def _from_byte_level(model: dict[str, Any], size: int) -> Vocabulary:
    vocabulary = _blank(BPE_MODEL, size)
    for text, number in model["vocab"].items():
        if number < size:
            vocabulary.tokens[number], vocabulary.types[number] = text, NORMAL
        else:
            vocabulary.left_out.append(text)
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    vocabulary.merges = [f"{left} {right}" for left, right in pairs]
    vocabulary.ignore_merges = bool(model.get("ignore_merges"))
    if not vocabulary.merges:
        raise UserError("GGUF: llama.cpp has no tokenizer without merges; export it with --to hf")
    return vocabulary


def _from_sentencepiece(file: Path, size: int) -> Vocabulary:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(file.read_bytes())
    if proto.trainer_spec.model_type != _SENTENCEPIECE_BPE:
        raise UserError(f"GGUF: {file.name} is a Unigram model, which llama.cpp does not have; export it with --to hf")
    vocabulary = _blank(SENTENCEPIECE_MODEL, size)
    vocabulary.scores = [_UNUSED_SCORE] * size
    for number, piece in enumerate(proto.pieces):
        if number >= size:
            vocabulary.left_out.append(piece.piece)
            continue
        vocabulary.tokens[number], vocabulary.scores[number] = piece.piece, piece.score
        vocabulary.types[number] = piece.type  # GGUF has SentencePiece's numbers
    return vocabulary


def _from_merges(model: dict[str, Any], size: int) -> Vocabulary:
    """SentencePiece BPE of which only tokenizer.json is left: the earlier a merge, the higher the score."""
    vocabulary = _blank(SENTENCEPIECE_MODEL, size)
    vocabulary.scores = [_UNUSED_SCORE] * size
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    for text, number in model["vocab"].items():
        if number >= size:
            vocabulary.left_out.append(text)
            continue
        vocabulary.tokens[number], vocabulary.types[number] = text, NORMAL
        vocabulary.scores[number] = -float(ranks.get(text, len(ranks) + number))
        if _BYTE_TOKEN.fullmatch(text):
            vocabulary.types[number], vocabulary.scores[number] = BYTE, 0.0
        elif text == model.get("unk_token"):
            vocabulary.types[number], vocabulary.scores[number] = UNKNOWN, 0.0
    return vocabulary


def _place(vocabulary: Vocabulary, token: AddedToken, size: int) -> None:
    if token.id >= size:
        if token.text not in vocabulary.left_out:
            vocabulary.left_out.append(token.text)
        return
    is_control = token.special or _LOOKS_SPECIAL.fullmatch(token.text) is not None
    text = token.text if is_control else token.text.replace(_SPACE, " ")  # llama.cpp finds it in the text as typed
    vocabulary.tokens[token.id] = text
    vocabulary.types[token.id] = CONTROL if is_control else USER_DEFINED
    if vocabulary.scores:
        vocabulary.scores[token.id] = _ADDED_SCORE


def _make_unique(vocabulary: Vocabulary) -> None:
    """llama.cpp ends itself where two tokens have the same text, or where one is empty. Those that the tokenizer can
    never produce get a placeholder; of two others, only one could be kept."""
    seen: dict[str, int] = {}
    for number, text in enumerate(vocabulary.tokens):
        other = seen.setdefault(text, number)
        if other == number and text:
            continue
        unused = next((one for one in (number, other) if vocabulary.types[one] == UNUSED), None)
        if text and unused is None and NORMAL in (vocabulary.types[number], vocabulary.types[other]):
            unused = number if vocabulary.types[number] == NORMAL else other
        if text and unused is None:
            raise UserError(f"GGUF: tokens {other} and {number} have the same text {text!r}, which llama.cpp refuses")
        place = number if unused is None else unused
        seen[text] = other if place == number else number
        vocabulary.tokens[place], vocabulary.types[place] = f"[UNUSED{place}]", UNUSED
        seen[vocabulary.tokens[place]] = place
