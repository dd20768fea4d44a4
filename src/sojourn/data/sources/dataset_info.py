"""LLaMA-Factory's dataset_info.json: data sets by name, with their file or hub name, columns and tags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sojourn.config.data import Columns, Source
from sojourn.config.messages import did_you_mean, printable
from sojourn.data.sources.files import user_path
from sojourn.errors import UserError
from sojourn.storage.files import read_json

FILE = "dataset_info.json"
_LOCATIONS = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_OURS = {"query": "input", "response": "completion", "kto_tag": "label"}  # other columns have the same name here


def named_sources(sources: list[Source], folder: str | None) -> list[Source]:
    """The sources with names of dataset_info.json replaced by what it says of them; `a,b` is two sources."""
    listing = user_path(folder or "data", "data.dataset_dir") / FILE
    return [_resolve(part, path, listing, bool(folder)) for source in sources for part, path in _parts(source)]


def _parts(source: Source) -> Iterator[tuple[Source, Path]]:
    whole = user_path(source.path, "data.sources")
    is_one = whole.exists() or any(sign in source.path for sign in "*?[")
    for name in [source.path] if is_one else source.path.split(","):
        yield source.model_copy(update={"path": name.strip()}), user_path(name.strip(), "data.sources")


def _resolve(source: Source, path: Path, listing: Path, is_named: bool) -> Source:
    """`is_named`: the user named the folder of `listing`."""
    own = path if path.name == FILE else path / FILE
    if path.exists() and (entries := _entries(own)):
        if len(entries) > 1:
            names = ", ".join(list(entries)[:20])
            message = f"name its data sets: data.sources={next(iter(entries))} data.dataset_dir={own.parent}"
            raise UserError(f"data.sources: {own}: {message} (there are: {names})")
        return _as_source(source, own, *entries.popitem())
    if path.exists() and not (is_named and source.path in _entries(listing)):
        return source
    entries = _entries(listing)
    if is_named and not entries:
        raise UserError(f"data.dataset_dir: {listing}: no such file, or it names no data set")
    if is_named and source.path.isidentifier() and source.path not in entries:
        hint = did_you_mean(source.path, entries)
        raise UserError(
            f"data.sources: {source.path}: not in {listing}{hint} (there are: {', '.join(list(entries)[:20])})"
        )
    return _as_source(source, listing, source.path, entries[source.path]) if source.path in entries else source


def _entries(file: Path) -> dict[str, dict[str, Any]]:
    """The data sets of the file; none if there is no such file, or if it is another library's."""
    found = read_json(file) if file.is_file() else None
    entries = found.items() if isinstance(found, dict) else ()
    return {
        name: entry for name, entry in entries if isinstance(entry, dict) and any(key in entry for key in _LOCATIONS)
    }


def _as_source(source: Source, file: Path, name: str, entry: dict[str, Any]) -> Source:
    where = f"{file}: {printable(name)}"
    if media := [key for key in _MEDIA if key in (entry.get("columns") or {})]:
        raise UserError(f"{where}: it has {', '.join(media)}: media cannot be trained on, only text; name another one")
    path = str(file.parent / str(entry["file_name"])) if entry.get("file_name") else entry.get("hf_hub_url")
    if not path:
        raise UserError(f"{where}: neither file_name nor hf_hub_url; download it and add its file_name")
    changes: dict[str, Any] = {"path": path}
    for theirs, ours in (("subset", "config"), ("split", "split"), ("num_samples", "take")):
        if entry.get(theirs) and getattr(source, ours) is None:
            changes[ours] = entry[theirs]
    try:
        columns = source.columns or Columns.model_validate(_columns(entry))
        return Source.model_validate({**source.model_dump(), **changes, "columns": columns.model_dump()})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: {'.'.join(map(str, first['loc']))}: {printable(first['msg'], 200)}") from None


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    """Our columns for LLaMA-Factory's; those that a file does not have by default are found by their names."""
    given = {key: value for key, value in (entry.get("columns") or {}).items() if value}
    tags = {key.removesuffix("_tag").replace("function", "function_call"): value
            for key, value in (entry.get("tags") or {}).items()}  # fmt: skip
    if not given:
        return {"tags": tags} if tags else {}
    if entry.get("formatting", "alpaca") == "alpaca":
        given = {
            **{key: name for key, name in _ALPACA.items() if key != "response" or not entry.get("ranking")},
            **given,
        }
    elif entry.get("ranking"):
        given["prompt"] = given.pop("messages", "conversations")
    else:
        given.setdefault("messages", "conversations")
    return {**{_OURS.get(key, key): name for key, name in given.items()}, **({"tags": tags} if tags else {})}
