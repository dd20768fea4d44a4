"""Which tokens begin and end a text, as GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.export.gguf.vocabulary import Vocabulary
from sojourn.infer.gguf.tokenizer import CONTROL, SPECIAL_KEYS, STOPS_BY_TEXT, UNKNOWN

if TYPE_CHECKING:
    from gguf import GGUFWriter

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def special_ids(settings: dict[str, Any], config: dict[str, Any], vocabulary: Vocabulary) -> dict[str, int]:
    """By the texts that the tokenizer's files name; else by the ids in config.json, if special tokens have them."""
    ids = {text: number for number, text in enumerate(vocabulary.tokens)}
    found: dict[str, int] = {}
    for name in _NAMES:
        entry = settings.get(f"{name}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str) and text:
            if text in vocabulary.left_out:
                raise UserError(
                    f"GGUF: {name}_token {text} is beyond the model's embedding of {len(vocabulary.tokens):,} rows; "
                    "resize the embedding, or name another token in tokenizer_config.json"
                )
            if text in ids:
                found[name] = ids[text]
                continue
        number = config.get(f"{name}_token_id")
        is_listed = type(number) is int and 0 <= number < len(vocabulary.tokens)
        if is_listed and vocabulary.types[number] in (CONTROL, UNKNOWN):
            found[name] = number
    if "eos" not in found:
        raise UserError(
            "GGUF: the tokenizer has no eos_token, so llama.cpp would never stop; name it in tokenizer_config.json"
        )
    return found


def other_stops(eos: int, stop_ids: list[int], vocabulary: Vocabulary) -> tuple[dict[str, int], list[str]]:
    """Stop tokens that llama.cpp does not find by itself: as `eot` and `eom`, and those for which no key is left."""
    rest = [
        number
        for number in dict.fromkeys(stop_ids)
        if number != eos and number < len(vocabulary.tokens) and vocabulary.tokens[number] not in STOPS_BY_TEXT
    ]
    return dict(zip(("eot", "eom"), rest, strict=False)), [vocabulary.tokens[number] for number in rest[2:]]


def add_special_tokens(writer: GGUFWriter, ids: dict[str, int], adds: dict[str, bool]) -> None:
    """`adds`: whether the tokenizer puts `bos` before a text, and `eos` after it."""
    for name, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{SPECIAL_KEYS.get(name, name)}_token_id", number)
    for name, value in adds.items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
