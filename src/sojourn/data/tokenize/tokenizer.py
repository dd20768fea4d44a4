"""Opens tokenizers, chooses their chat template, and keeps them in the form that plain transformers opens."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.data import DataConfig
from sojourn.config.words import closest
from sojourn.data.sources.document import Message
from sojourn.data.sources.files import user_path
from sojourn.data.sources.formats import BadRecord
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.templates import END_OF_TEXT, NAMED, named_template
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINED = ("auto", "bpe", "sentencepiece")
_ENDS = (END_OF_TEXT, "<|end_of_text|>")
_LESS_SURE_ENDS = ("</s>", "<eos>")
_MARK = re.compile(r"<\|[^|<>\s]+\|>")
_PROBE = (
    Message("user", "Hello"),
    Message("assistant", "Hello"),
    Message("user", "Hello"),
    Message("assistant", "Hello"),
)


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer with what stands beside it: the names of its special tokens and its own chat template."""

    settings: dict[str, Any]
    fast_file: Path | None = None
    model_file: Path | None = None
    own_template: str | None = None
    made: Tokenizer | None = None  # just now, and in no folder yet

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.made is not None:
            return self.made
        if self.fast_file is not None:
            return _from_file(self.fast_file)
        from sojourn.data.tokenize.sentencepiece_model import convert

        assert self.model_file is not None  # noqa: S101
        return convert(self.model_file)

    def identity(self) -> str:
        """A hash of all that decides what it does."""
        digest = hashlib.sha256(json.dumps([self.names, self.own_template], sort_keys=True).encode())
        digest.update((self.fast_file or self.model_file or Path()).read_bytes())
        return digest.hexdigest()

    @cached_property
    def names(self) -> dict[str, str]:
        """What templates call the special tokens: bos_token, eos_token, …"""
        found = {}
        for key, value in self.settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
        return found

    @cached_property
    def added(self) -> dict[str, bool]:
        """Every token beside the learned vocabulary, and whether it is special."""
        return {token.content: token.special for token in self.tokenizer.get_added_tokens_decoder().values()}

    @cached_property
    def end_of_text(self) -> str:
        for token in (*_ENDS, self.names.get("eos_token"), *_LESS_SURE_ENDS):
            if token and self.tokenizer.token_to_id(token) is not None:
                return token
        raise UserError("data.tokenizer: it has no token that ends a text (eos_token in tokenizer_config.json)")

    @property
    def pad_id(self) -> int:
        return self.id_of(self.names.get("pad_token") or self.end_of_text)

    def id_of(self, token: str) -> int:
        number: int | None = self.tokenizer.token_to_id(token)
        return self.id_of(self.end_of_text) if number is None else number

    def template(self, choice: str) -> Template:
        """The chat template: the tokenizer's own, that of its family, or the one that the user names."""
        template = Template(self._template_source(choice), self.names, self.added)
        way_out = "auto" if self.own_template and choice != "auto" else "plain"
        return checked(template, lambda token: self.tokenizer.token_to_id(token) is not None, choice, way_out)

    def _template_source(self, choice: str) -> str:
        if choice in NAMED:
            return named_template(choice, self.end_of_text)
        if choice == "auto":
            if self.own_template:
                return self.own_template
            family = [name for name, marks in NAMED.items() if marks.tokens and set(marks.tokens) <= self.added.keys()]
            if family:
                return named_template(family[0], self.end_of_text)
            raise UserError(
                "data.template: this tokenizer has no chat template and is of no known family; choose one that its "
                "model was trained with (a .jinja file), or data.template=plain, which works with every tokenizer"
            )
        return template_file(choice)

    def save(self, folder: Path, template: Template | None, max_length: int) -> None:
        """The tokenizer's files; with a template, models that use them stop at the end of a turn."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model_file and self.model_file.parent != folder:
            shutil.copyfile(self.model_file, folder / "tokenizer.model")
        self.tokenizer.save(str(folder / "tokenizer.json"))
        settings = dict(self.settings)
        if self.made is not None:
            ends = template.end_of_turn() if template else self.end_of_text
            settings |= {"model_max_length": max_length, "eos_token": ends}
        settings.setdefault("eos_token", template.end_of_turn() if template else self.end_of_text)
        settings.setdefault("pad_token", self.end_of_text)
        source = template.source if template else self.own_template
        settings.pop("chat_template", None)
        if source:
            settings["chat_template"] = source
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def checked(template: Template, has: Callable[[str], bool], name: str, way_out: str = "plain") -> Template:
    """The template, if it works and all special tokens that it writes are in the vocabulary."""
    try:
        shown = template.text(_PROBE)
        missing = [token for token in dict.fromkeys(_MARK.findall(shown)) if not has(token)]
        if missing:
            raise UserError(
                f"data.template: {name} needs {', '.join(missing)}, which this tokenizer does not have; "
                f"use data.template={way_out}"
            )
        template.end_of_turn()
    except BadRecord as error:
        raise UserError(f"data.template: {name}: {error}; use data.template={way_out}") from None
    return template


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "not UTF-8 text; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"data.template: {path}: {why}") from None


def template_file(choice: str) -> str:
    path = user_path(choice, "data.template")
    if path.suffix not in (".jinja", ".j2") or not path.is_file():
        hint, names = closest(choice, ("auto", *NAMED)), ", ".join(NAMED)
        raise UserError(f"data.template: “{choice}”: no such template{hint}; allowed: auto, {names}, or a .jinja file")
    return read_template(path)


def open_tokenizer(word: str | Path) -> TokenizerBundle:
    """A tokenizer by its folder, its file (tokenizer.json or tokenizer.model) or its model's name on the hub."""
    place = user_path(str(word), "data.tokenizer")
    if not place.exists():
        from sojourn.data.sources.hub import is_hub_name, tokenizer_folder

        name, _, revision = str(word).partition("@")
        if not is_hub_name(name):
            raise UserError(
                f"data.tokenizer: {word}: no such folder or file; allowed: {', '.join(TRAINED)}, or one that is there"
            )
        place = tokenizer_folder(name, revision or None)
    if place.suffix == ".gguf" and place.is_file():
        from sojourn.data.tokenize.gguf_tokenizer import unpacked_tokenizer

        place = unpacked_tokenizer(place)
    folder = place if place.is_dir() else place.parent
    model = place if place.suffix == ".model" else folder / "tokenizer.model"
    fast = place if place.suffix == ".json" else folder / "tokenizer.json"
    has_fast, has_model = fast.is_file() and place.suffix != ".model", model.is_file()
    if not (has_fast or has_model):
        raise UserError(f"data.tokenizer: {word}: no tokenizer.json and no tokenizer.model there")
    settings = _read(folder / "tokenizer_config.json") | _read(folder / "special_tokens_map.json")
    beside = folder / "chat_template.jinja"
    own = read_template(beside) if beside.is_file() else _own_template(settings.get("chat_template"))
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    return TokenizerBundle(settings, fast if has_fast else None, model if has_model else None, own)


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UserError(f"data.tokenizer: {path}: not a tokenizer: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {path}: not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _own_template(value: Any) -> str | None:
    """`chat_template` is a text, or a list of named ones of which `default` is meant."""
    if isinstance(value, list):
        named = {str(one.get("name")): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) and value.strip() else None


def special_tokens(data: DataConfig) -> list[str]:
    """The special tokens of a tokenizer that is yet to be trained."""
    name = "chatml" if data.template == "auto" else data.template
    template = NAMED[name].tokens if name in NAMED else ()
    return list(dict.fromkeys((END_OF_TEXT, *template, *data.special_tokens)))


def train_tokenizer(data: DataConfig, texts: Iterable[str], folder: Path, split_digits: bool = True) -> TokenizerBundle:
    """A new tokenizer from `texts`; a SentencePiece model is left in `folder`."""
    tokens = special_tokens(data)
    model = None
    if data.tokenizer == "sentencepiece":
        from sojourn.data.tokenize import sentencepiece_model

        tokenizer = sentencepiece_model.train(iter(texts), int(data.vocab_size), tokens, split_digits, folder)
        model = folder / "tokenizer.model"
    else:
        from sojourn.data.tokenize.bpe import train_bpe

        tokenizer = train_bpe(iter(texts), int(data.vocab_size), tokens, split_digits)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "additional_special_tokens": tokens,
        "clean_up_tokenization_spaces": False,
    }
    return TokenizerBundle(settings, model_file=model, made=tokenizer)
