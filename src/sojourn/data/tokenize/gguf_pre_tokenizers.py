"""The pre-tokenizers that llama.cpp knows by name (`tokenizer.ggml.pre`), and which of them a tokenizer has.

A name in the file is all that llama.cpp gets: it has the regular expressions itself, and a wrong name changes token ids
without an error. So the name is chosen by what a tokenizer does to a probe text, never by what it is called.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.messages import printable
from sojourn.data.tokenize.bpe import ONE_DIGIT, PATTERN, THREE_DIGITS
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BPE_MODEL = "gpt2"  # tokenizer.ggml.model of byte-level BPE


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns`: what llama.cpp splits by, one after the other. `exact`: what the tokenizers of that name split by,
    where llama.cpp only approximates it. `ignore_merges`: a word that is a token is not split, whatever the merges say.
    `adds_bos`: llama.cpp's default."""

    name: str
    patterns: tuple[str, ...]
    exact: tuple[str, ...] = ()
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = PATTERN.replace("DIGITS", ONE_DIGIT)
_LLAMA3 = PATTERN.replace("DIGITS", THREE_DIGITS)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"


def _by_case(upper: str, lower: str, suffix: str, digits: str) -> str:
    """Words split where lower case turns into upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# Of several that do the same, the first is used, unless `PREFERRED` has the architecture.
KNOWN = (
    PreTokenizer("qwen2", (_QWEN2,)),
    PreTokenizer("llama-bpe", (_LLAMA3,), ignore_merges=True, adds_bos=True),
    PreTokenizer("dbrx", (_LLAMA3,)),
    PreTokenizer("glm4", (_LLAMA3,)),
    PreTokenizer("chatglm-bpe", (_LLAMA3,)),
    PreTokenizer("smollm", (r"\p{N}", _GPT2)),
    PreTokenizer("gpt-2", (_GPT2,)),
    PreTokenizer(
        "tekken",
        (_by_case(_NOT_LOWER, _NOT_UPPER, "", ONE_DIGIT),),
        (_by_case(_UPPER, _LOWER, "", ONE_DIGIT),),
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(
        "gpt-4o",
        (_by_case(_NOT_LOWER, _NOT_UPPER, _SUFFIX, THREE_DIGITS),),
        (_by_case(_UPPER, _LOWER, _SUFFIX, THREE_DIGITS),),
    ),
)
PREFERRED = {"glm4": "glm4", "chatglm": "chatglm-bpe"}

# Every rule that sets two of them apart: runs of spaces and newlines, digits, contractions in both cases, changes of
# case, punctuation before newlines and slashes, combining marks, scripts without case.
PROBE = (
    "Hello world, it's 3 o'clock; I'VE 12 apples, 345 pears, 6789 plums and 1234567 seeds (ca. 3.14%)!\n"
    "  two  spaces\tand a tab \n\n\n   three newlines\r\n\r\n    indented: x += y/2; //comment\n"
    "camelCase HTTPServer XMLhttp ÀÉÎÕÜ éCole Straße ΕΛΛΗΝΙΚΆ Ελληνικά ПРИВЕТ мир "
    "e\u0301tude नमस्ते दुनिया កាន់តែ ภาษาไทย 中文分词，第3章。日本語カタカナ 한국어 مرحبا שלום "
    "I ❤️ 🍕 👩‍👩‍👧 ½ ² ⅷ ٣٤٥ ***---===### ...\n/path/to\\file a_b __init__ \u00a0nbsp\u2003em \u3000全角  \n "
    "'s 'S 'll 'LL 'Re don't DON'T   "
)


def known(name: str) -> PreTokenizer | None:
    return next((one for one in KNOWN if one.name == name), None)


def splitter(patterns: tuple[str, ...]) -> Any:
    """The pre-tokenizer of the `tokenizers` package that splits by these."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def set_pre_tokenizer(backend: Tokenizer, name: str, file: Path) -> None:
    """The one that the file names: transformers goes by the model's architecture instead."""
    named = known(name)
    if named is None:
        line = f"note: {file}: Sojourn does not know its pre-tokenizer “{printable(name)}”; token ids may be others"
        print(line, file=sys.stderr, flush=True)
        return
    backend.pre_tokenizer = splitter(named.exact or named.patterns)
    backend.model.ignore_merges = named.ignore_merges


def identify(tokenizer: Tokenizer, architecture: str, ignore_merges: bool) -> PreTokenizer:
    """The one that splits the probe text as this byte-level BPE tokenizer does."""
    pieces = _pieces(tokenizer.pre_tokenizer) if tokenizer.pre_tokenizer is not None else []
    found = [one for one in KNOWN if _pieces(splitter(one.exact or one.patterns)) == pieces]
    if not found:
        raise UserError(
            "this tokenizer splits text as none of llama.cpp's pre-tokenizers that Sojourn knows "
            f"({', '.join(one.name for one in KNOWN)}), so its token ids would differ there; export it with --to hf"
        )
    preferred = [one for one in found if one.name == PREFERRED.get(architecture)]
    unpreferred = [one for one in found if one.name not in PREFERRED.values()]
    same_merges = [one for one in unpreferred if one.ignore_merges == ignore_merges]
    return (preferred or same_merges or unpreferred or found)[0]


def _pieces(pre_tokenizer: Any) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(PROBE)]
