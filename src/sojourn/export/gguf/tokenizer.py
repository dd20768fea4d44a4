"""A model's tokenizer as GGUF metadata. Before it is written, it is read back as llama.cpp reads it, and its token ids
are compared with transformers' on probe texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sojourn.data.tokenize.gguf_pre_tokenizers import BPE_MODEL, PROBE, identify
from sojourn.data.tokenize.tokenizer import TokenizerBundle, open_tokenizer
from sojourn.errors import UserError
from sojourn.export.gguf.chat_template import probe_chats, templates_of
from sojourn.export.gguf.special_tokens import add_special_tokens, added_around, other_stops, special_ids
from sojourn.export.gguf.vocabulary import AddedToken, Vocabulary, added_tokens, read_definition, read_vocabulary
from sojourn.infer.gguf.tokenizer import CONTROL, USER_DEFINED, GgufTokenizer
from sojourn.infer.runtimes.transformers_tokenizer import as_ids
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer as open_with_transformers
from sojourn.infer.weight_source import WeightSource

if TYPE_CHECKING:
    from gguf import GGUFWriter

Say = Callable[[str], None]
_MOST_SPECIAL_PROBES = 40
_TEXTS = (
    *("Hello, world! It's 12:45 on the 3rd; we'll pay $1,234.50 (ca. 20%).", " leading", "trailing ", "  two  spaces"),
    *("\n", "\n\n\n", "a\tb\n\tc\r\nd", "line one\n\n    line two\n", "a                 b", "..............!!!"),
    *("今天天气很好，我们去公园散步吧。", "第3章：数据（共128页）", "日本語の文章です。", "한국어 문장"),
    *("Привет, мир", "Ελληνικά", "Straße à Paris"),
    *("0123456789 007 3.14159 1e-4  12   345", "def f(x):\n    return x ** 2  # twice\n", "https://example.com/a?b=c&d=%20"),
    *("I 🍕 you", "camelCase HTTPServer snake_case DON'T don't", "hahahahahaha <b>bold</b> {\"a\": [1, 2]}"),
)  # fmt: skip
# Where llama.cpp is known to differ for some tokenizers: no normalizer, no classes of combining marks
_DIFFICULT = ("e\u0301tude \ufb01 \uff21\u3000x", "नमस्ते दुनिया", "កាន់តែពិសេស", "👩‍👩‍👧 ❤️ 🇨🇳", *PROBE.split("\n"))


def add_tokenizer(writer: GGUFWriter, weights: WeightSource, rows: int, say: Say) -> list[AddedToken]:
    """`rows`: of the model's embedding. Returns the added tokens."""
    bundle = open_tokenizer(weights.tokenizer_folder)
    theirs = open_with_transformers(weights.tokenizer_folder)
    added = added_tokens(bundle, weights.tokenizer_folder)
    definition = read_definition(bundle)
    vocabulary = read_vocabulary(definition, bundle.model_file, added, rows)
    _say_left_out(vocabulary, added, writer.arch, say)
    _add_vocabulary(writer, vocabulary, bundle, definition)
    ids = special_ids(bundle.settings, weights.config, vocabulary)
    stops = sorted(as_ids(weights.generation_config.get("eos_token_id")) | as_ids(weights.config.get("eos_token_id")))
    more, unnamed = other_stops(ids["eos"], stops, vocabulary)
    if unnamed:
        say(f"note: a GGUF file has no place for so many stop tokens; llama.cpp does not stop at {', '.join(unnamed)}")
    around = added_around(theirs, bundle.settings, definition.get("post_processor") or {}, ids)
    add_special_tokens(writer, {**ids, **more}, around)
    templates = templates_of(theirs)
    if templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
    else:
        say("note: the tokenizer has no chat template; llama.cpp and Ollama take prompts as they are")
    chats = probe_chats(theirs)
    if vocabulary.model == BPE_MODEL:
        ours = GgufTokenizer(metadata(writer))
        difference = _first_difference(ours, theirs, [*chats, *_texts(vocabulary)])
    else:
        ours, difference = _choose_space_prefix(writer, bundle.settings, theirs, chats, _texts(vocabulary), say)
    if difference:
        raise UserError(f"GGUF: llama.cpp would read this tokenizer otherwise: {difference}; export it with --to hf")
    _say_known_differences(ours, theirs, say)
    return added


def _add_vocabulary(
    writer: GGUFWriter, vocabulary: Vocabulary, bundle: TokenizerBundle, definition: dict[str, Any]
) -> None:
    pre = "default"
    if vocabulary.model == BPE_MODEL:
        normalizer = definition.get("normalizer") or {}
        kinds = [one.get("type") for one in normalizer.get("normalizers", [normalizer]) if one]
        if any(kind != "NFC" for kind in kinds):
            raise UserError(
                f"GGUF: llama.cpp has no {', '.join(map(str, kinds))} normalizer, so token ids would differ; "
                "export it with --to hf"
            )
        pre = identify(bundle.tokenizer, writer.arch, vocabulary.ignore_merges).name
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)


def _texts(vocabulary: Vocabulary) -> list[str]:
    special = [
        text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in (CONTROL, USER_DEFINED)
    ]
    return [*_TEXTS, *(f"{token}x {token}{token} y" for token in special[:_MOST_SPECIAL_PROBES])]


def _choose_space_prefix(
    writer: GGUFWriter, settings: dict[str, Any], theirs: Any, chats: list[str], texts: list[str], say: Say
) -> tuple[GgufTokenizer, str]:
    """llama.cpp puts a space before every text after a special token, or never. What renders chats right is chosen.
    Also returns the first difference of those, or of texts where there is no chat template."""
    default = settings.get("add_prefix_space")
    first = default if isinstance(default, bool) else writer.arch != "gemma3"
    tried: list[tuple[GgufTokenizer, str]] = []
    for value in (first, not first):
        writer.kv_data[0].pop("tokenizer.ggml.add_space_prefix", None)
        if isinstance(default, bool) or value != first or not value:
            writer.add_add_space_prefix(value)
        ours = GgufTokenizer(metadata(writer))
        in_chats, in_texts = (_first_difference(ours, theirs, some) for some in (chats, texts))
        if not in_chats and (chats or not in_texts):
            if in_texts:
                say(f"note: llama.cpp reads some texts outside of chats otherwise: {in_texts}")
            return ours, ""
        tried.append((ours, in_chats or in_texts))
    return tried[0]


def _first_difference(ours: GgufTokenizer, theirs: Any, texts: list[str]) -> str:
    """Empty where all ids are equal."""
    for text in texts:
        expected: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
        found = ours.encode(text)
        if found != expected:
            at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), 0)
            return f"{_short(text)!r} becomes {found[at : at + 4]} there, {expected[at : at + 4]} here (token {at + 1})"
    return ""


def metadata(writer: GGUFWriter) -> dict[str, Any]:
    """What has been added so far."""
    return {key: value.value for key, value in writer.kv_data[0].items()}


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _say_left_out(vocabulary: Vocabulary, added: list[AddedToken], architecture: str, say: Say) -> None:
    if vocabulary.left_out:
        names = ", ".join(vocabulary.left_out[:3]) + (", …" if len(vocabulary.left_out) > 3 else "")
        say(
            f"note: {len(vocabulary.left_out)} tokens are left out ({names}): the model's embedding has only "
            f"{len(vocabulary.tokens):,} rows"
        )
    strips = [one.text for one in added if one.lstrip or (one.rstrip and architecture != "phi3")]
    if strips:
        say(f"note: llama.cpp keeps the spaces around {strips[0]}, which this tokenizer drops")


def _say_known_differences(ours: GgufTokenizer, theirs: Any, say: Say) -> None:
    difference = _first_difference(ours, theirs, [unicodedata.normalize("NFC", text) for text in _DIFFICULT])
    if difference:
        say(f"note: llama.cpp splits some scripts otherwise than this tokenizer: {difference}")
    elif _first_difference(ours, theirs, list(_DIFFICULT)):
        say("note: llama.cpp does not normalize text to NFC; decomposed accents get other tokens there")
