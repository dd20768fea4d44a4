"""Checks a tokenizer that came from elsewhere before any library opens it: kinds and sizes of its files, ids, patterns
that would take for ever, settings that would fill the memory. Whatever opens a tokenizer's folder calls
`check_tokenizer`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.data.tokenize.backtracking import may_backtrack
from sojourn.errors import UserError
from sojourn.storage.files import CannotRead, NotValid, file_size, parse_json, read_bytes
from sojourn.storage.foreign_json import check_link, load_foreign_json

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "spiece.model")
_MOST_BYTES = 256 << 20
_MOST_TEMPLATE = 1 << 20
_MOST_ID = 10**7
_MOST_PADDING = 1 << 24
_MOST_GROWTH = 1000
_AGAIN = "copy or download it again"


def check_tokenizer(folder: Path) -> None:
    """Raises one line for a folder whose tokenizer cannot be sound. Nothing is opened by a library."""
    for name in (*_FILES, *_SETTINGS):
        path = folder / name
        if not (path.is_symlink() or path.exists()):
            continue
        try:
            check_link(path)
            stat = path.stat()
            if file_size(path) > _MOST_BYTES:
                raise NotValid(f"larger than {_MOST_BYTES:,} bytes")
            _check_file(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)
        except FileNotFoundError:
            raise UserError(f"{path}: a link to a file that is not there; {_AGAIN}") from None
        except CannotRead:
            raise
        except NotValid as error:
            raise UserError(f"{path}: {printable(error, 200)}; {_AGAIN}") from None


@lru_cache(maxsize=64)
def _check_file(path: Path, *_stamp: int) -> None:
    if path.name == "tokenizer.json":
        _check_fast(parse_json(read_bytes(path, _MOST_BYTES)))
    elif path.name in _SETTINGS:
        _check_settings(load_foreign_json(path), path.name)
    elif path.name == "chat_template.jinja":
        try:
            _check_template(read_bytes(path, _MOST_TEMPLATE).decode("utf-8"))
        except UnicodeDecodeError:
            raise NotValid("not UTF-8 text; save it as UTF-8") from None


def _check_settings(settings: Any, name: str) -> None:
    if not isinstance(settings, dict):
        raise NotValid("not a mapping")
    if name == "added_tokens.json":
        _check_ids(settings.values())
        return
    for key, kind in (("tokenizer_class", str), ("added_tokens_decoder", dict), ("model_input_names", list)):
        if settings.get(key) is not None and not isinstance(settings[key], kind):
            raise NotValid(f"{key} is not a {kind.__name__}")
    for token in settings.get("added_tokens_decoder") or ():
        if not (token.isascii() and token.isdigit() and int(token) <= _MOST_ID):
            raise NotValid(f"a token with the id {token[:20]}")
    templates = settings.get("chat_template")
    for one in templates if isinstance(templates, list) else [templates]:
        text = one.get("template") if isinstance(one, dict) else one
        if text is not None and not isinstance(text, str):
            raise NotValid("chat_template is not a text")
        _check_template(text or "")


def _check_template(text: str) -> None:
    if len(text) > _MOST_TEMPLATE:
        raise NotValid(f"a chat template of {len(text):,} characters")


def _check_fast(found: Any) -> None:
    """tokenizer.json, as the tokenizers library writes it."""
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise NotValid("not a tokenizer: it has no model")
    vocabulary = found["model"].get("vocab")
    if isinstance(vocabulary, dict):
        _check_ids(vocabulary.values(), len(vocabulary))
    elif not isinstance(vocabulary, list):
        raise NotValid("its model has no vocabulary")
    added = found.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise NotValid("its added tokens are not a list of tokens")
    _check_ids(one.get("id") for one in added)
    _check_padding(found.get("padding"))
    growth = 1.0
    for part in _parts([found.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]):
        pattern = part.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(regex, str) and may_backtrack(regex):
            raise NotValid(f"its pattern {regex[:60]!r} can take exponential time; take the publisher's own tokenizer")
        growth *= _growth(part)
    if growth > _MOST_GROWTH:
        raise NotValid(f"it makes texts more than {_MOST_GROWTH:,} times as long")


def _check_ids(ids: Any, count: int = 0) -> None:
    for one in ids:
        if type(one) is not int or not 0 <= one <= max(_MOST_ID, 2 * count):
            raise NotValid(f"a token with the id {str(one)[:20]}")


def _check_padding(padding: Any) -> None:
    if not isinstance(padding, dict):
        return
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed") if isinstance(strategy, dict) else None
    for length in (fixed, padding.get("pad_to_multiple_of")):
        if length is not None and not (type(length) is int and 0 <= length <= _MOST_PADDING):
            raise NotValid(f"it pads every text to {str(length)[:20]} tokens")


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a text can become."""
    content = part.get("content")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    pattern = part.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    matched = len(literal) if isinstance(literal, str) else 1
    return max(1.0, (len(content) + (matched == 0)) / max(1, matched))


def _parts(found: Any) -> Iterator[dict[str, Any]]:
    """Every mapping within."""
    rest = [found]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            yield one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
