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
        text = _text(settings.get(f"{name}_token"))
        if text is not None:
            if text in vocabulary.left_out:
                raise UserError(
                    f"GGUF: {name}_token {text} is beyond the model's embedding of {len(vocabulary.tokens):,} rows; "
                    "resize the embedding, or name another token in tokenizer_config.json"
                )
            if text in ids:
                found[name] = ids[text]
                continue
        number = config.get(f"{name}_token_id")
        if not isinstance(number, int) or not 0 <= number < len(vocabulary.tokens):
            continue
        if vocabulary.types[number] in (CONTROL, UNKNOWN):
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


def added_around(
    theirs: Any, settings: dict[str, Any], processor: dict[str, Any], ids: dict[str, int]
) -> dict[str, bool]:
    """Whether the tokenizer puts `bos` before a text, `eos` after it, and a separator between two. `processor`: the
    post-processor in tokenizer.json."""
    text: list[int] = theirs("a", add_special_tokens=True)["input_ids"]
    around = {"bos": text[:1] == [ids.get("bos")]}
    adds_eos = text[-1:] == [ids["eos"]]
    if adds_eos or isinstance(settings.get("add_eos_token"), bool):
        around["eos"] = adds_eos
    for step in processor.get("processors", [processor]):
        between = _between_two(step.get("pair") or [])
        if between:
            separators = [_text(settings.get(f"{name}_token")) for name in ("sep", "eos")]
            around["sep"] = any(one in separators for one in between)
    return around


def _between_two(pair: list[dict[str, Any]]) -> list[str]:
    """Special tokens that a template of a post-processor writes between two texts."""
    texts = [number for number, piece in enumerate(pair) if "Sequence" in piece]
    inner = pair[texts[0] + 1 : texts[-1]] if texts else []
    return [str(piece["SpecialToken"]["id"]) for piece in inner if "SpecialToken" in piece]


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def add_special_tokens(writer: GGUFWriter, ids: dict[str, int], adds: dict[str, bool]) -> None:
    for name, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{SPECIAL_KEYS.get(name, name)}_token_id", number)
    for name, value in adds.items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
