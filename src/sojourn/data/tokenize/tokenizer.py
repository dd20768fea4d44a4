"""Opens or trains a tokenizer, chooses its chat template, and saves both as transformers opens them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.data import DataConfig
from sojourn.data.sources.files import user_path
from sojourn.data.tokenize.char_level import UNKNOWN_CHARACTER, train_char
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.templates import END_OF_TEXT, NAMED, named_template, read_template, read_template_file
from sojourn.data.tokenize.tokenizer_check import check_tokenizer
from sojourn.errors import UserError
from sojourn.storage.hub_cache import cached_snapshot

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINED = ("auto", "bpe", "sentencepiece", "char")
_END_OF_TEXT_TOKENS = (END_OF_TEXT, "<|end_of_text|>")
_EOS_TOKENS = ("</s>", "<eos>")  # tried after the eos_token that the tokenizer names


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer with the names of its special tokens and its own chat template."""

    settings: dict[str, Any]
    fast_file: Path | None = None
    model_file: Path | None = None
    own_template: str | None = None
    trained: Tokenizer | None = None  # newly trained, not saved yet

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.trained is not None:
            return self.trained
        if self.fast_file is not None:
            return _from_file(self.fast_file)
        from sojourn.data.tokenize.sentencepiece_model import convert

        assert self.model_file is not None  # noqa: S101
        return convert(self.model_file)

    def fast_file_in(self, folder: Path) -> Path:
        """Its tokenizer.json; where it has none, one is written to `folder`."""
        if self.fast_file is not None:
            return self.fast_file
        file = folder / "tokenizer.json"
        self.tokenizer.save(str(file))
        return file

    def identity(self) -> str:
        """A hash of everything that decides its output."""
        digest = hashlib.sha256(json.dumps([self.special_names, self.own_template], sort_keys=True).encode())
        digest.update((self.fast_file or self.model_file or Path()).read_bytes())
        return digest.hexdigest()

    @cached_property
    def special_names(self) -> dict[str, str]:
        """Special tokens by the names that templates use: bos_token, eos_token, …"""
        names = {}
        for key, value in self.settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
        return names

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Every added token, and whether it is special."""
        return {token.content: token.special for token in self.tokenizer.get_added_tokens_decoder().values()}

    @cached_property
    def end_of_text(self) -> str:
        for token in (*_END_OF_TEXT_TOKENS, self.special_names.get("eos_token"), *_EOS_TOKENS):
            if token and self.tokenizer.token_to_id(token) is not None:
                return token
        raise UserError("data.tokenizer: it has no end-of-text token (eos_token in tokenizer_config.json)")

    @property
    def pad_id(self) -> int:
        return self.id_of(self.special_names.get("pad_token") or self.end_of_text)

    def id_of(self, token: str) -> int:
        id: int | None = self.tokenizer.token_to_id(token)
        return self.id_of(self.end_of_text) if id is None else id

    def template(self, choice: str) -> Template:
        """The chat template: the tokenizer's own, that of its family, or the one the user names."""
        template = Template(self._template_source(choice), self.special_names, self.added_tokens)
        alternative = "auto" if self.own_template and choice != "auto" else "plain"
        template.check(lambda token: self.tokenizer.token_to_id(token) is not None, choice, alternative)
        return template

    def _template_source(self, choice: str) -> str:
        if choice in NAMED:
            return named_template(choice, self.end_of_text)
        if choice == "auto":
            if self.own_template:
                return self.own_template
            family = [name for name, one in NAMED.items() if one.tokens and set(one.tokens) <= self.added_tokens.keys()]
            if family:
                return named_template(family[0], self.end_of_text)
            raise UserError(
                "data.template: this tokenizer has no chat template and belongs to no known family; name the one its "
                "model was trained with (a .jinja file), or set data.template=plain, which works with every tokenizer"
            )
        return read_template_file(choice)

    def save(self, folder: Path, template: Template | None, max_length: int) -> None:
        """Writes the tokenizer's files; with a template, eos_token is the end of a turn."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model_file and self.model_file.parent != folder:
            shutil.copyfile(self.model_file, folder / "tokenizer.model")
        self.tokenizer.save(str(folder / "tokenizer.json"))
        settings = dict(self.settings)
        if self.trained is not None:
            eos = template.end_of_turn() if template else self.end_of_text
            settings |= {"model_max_length": max_length, "eos_token": eos}
        settings.setdefault("eos_token", template.end_of_turn() if template else self.end_of_text)
        settings.setdefault("pad_token", self.end_of_text)
        source = template.source if template else self.own_template
        settings.pop("chat_template", None)
        if source:
            settings["chat_template"] = source
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def open_tokenizer(name: str | Path) -> TokenizerBundle:
    """A tokenizer by its folder, its file (tokenizer.json or tokenizer.model) or its model's name on the hub."""
    path = user_path(str(name), "data.tokenizer")
    if not path.exists():
        from sojourn.data.sources.hub import is_hub_name, tokenizer_folder

        model_name, _, revision = str(name).partition("@")
        if not is_hub_name(model_name):
            raise UserError(
                f"data.tokenizer: {name}: no such file or folder; allowed: {', '.join(TRAINED)}, a path, or a model "
                "on the hub"
            )
        path = tokenizer_folder(model_name, revision or None)
    if path.suffix == ".gguf" and path.is_file():
        from sojourn.data.tokenize.gguf_tokenizer import extract_tokenizer

        path = extract_tokenizer(path)
    return _open_files(path, name)


def open_tokenizer_here(name: str) -> TokenizerBundle | None:
    """None where it is not on this machine, is to be trained, or takes a while to convert."""
    path = user_path(name, "data.tokenizer")
    if not path.exists():
        model_name, _, revision = name.partition("@")
        path = cached_snapshot(model_name, revision or None) or path  # where some of its files may be missing
        is_here = any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    else:
        is_here = path.suffix != ".gguf"
    return _open_files(path, name) if is_here and name not in TRAINED else None


def _open_files(path: Path, name: str | Path) -> TokenizerBundle:
    folder = path if path.is_dir() else path.parent
    model = path if path.suffix == ".model" else folder / "tokenizer.model"
    fast = path if path.suffix == ".json" else folder / "tokenizer.json"
    has_fast, has_model = fast.is_file() and path.suffix != ".model", model.is_file()
    if not (has_fast or has_model):
        raise UserError(f"data.tokenizer: {name}: it has no tokenizer.json and no tokenizer.model")
    _check_foreign(folder)
    settings = _read_settings(folder / "tokenizer_config.json") | _read_settings(folder / "special_tokens_map.json")
    template_path = folder / "chat_template.jinja"
    own = read_template(template_path) if template_path.is_file() else _own_template(settings.get("chat_template"))
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    return TokenizerBundle(settings, fast if has_fast else None, model if has_model else None, own)


def _check_foreign(folder: Path) -> None:
    try:
        check_tokenizer(folder)
    except UserError as error:
        raise type(error)(f"data.tokenizer: {error}") from None


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UserError(f"data.tokenizer: {path}: not a tokenizer: {error}") from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {path}: not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _own_template(value: Any) -> str | None:
    """`chat_template` is a string, or a list of named templates, of which `default` is used."""
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
    """A new tokenizer trained on `texts`; a SentencePiece model is written to `folder`."""
    tokens = special_tokens(data)
    model = None
    if data.tokenizer == "sentencepiece":
        from sojourn.data.tokenize import sentencepiece_model

        tokenizer = sentencepiece_model.train(iter(texts), int(data.vocab_size), tokens, split_digits, folder)
        model = folder / "tokenizer.model"
    elif data.tokenizer == "char":
        tokenizer = train_char(iter(texts), int(data.vocab_size), tokens)
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
    if data.tokenizer == "char":
        settings["unk_token"] = UNKNOWN_CHARACTER
    return TokenizerBundle(settings, model_file=model, trained=tokenizer)
