"""Data sets and tokenizers from the Hugging Face hub, or from its local cache when offline."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.catalog.datasets import DatasetFacts, datasets
from sojourn.config.data import Source
from sojourn.config.messages import did_you_mean, normalize, printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.storage.hub_access import (
    Say,
    gated_error,
    hub_errors_as_user_errors,
    not_cached_error,
    offline_reason,
    silence_logging,
    unreadable_error,
)

_ORG_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([^/\\:]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_EXTENSIONS = "txt md json jsonl ndjson csv tsv parquet arrow bin py yaml yml gz zst xz bz2 zip tar 7z"
_TOKENIZER_FILES = "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json chat_template.jinja"


@dataclass(frozen=True)
class HubTable:
    """A data set in the local cache. `fingerprint` is a hash of commit, configuration and split."""

    name: str
    rows: int
    columns: tuple[str, ...]
    fingerprint: str
    columns_map: dict[str, str]
    is_lines: bool  # each row is one line of a continuous text
    _table: Any = field(repr=False, compare=False)

    def batches(self, size: int = 1000) -> Iterator[list[dict[str, Any]]]:
        """Its rows in order, `size` at a time; the table stays on disk."""
        for batch in self._table.iter(batch_size=size):
            yield [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def is_hub_name(path: str) -> bool:
    """Whether this is a data set's name: a short name, `hub:ORG/NAME`, or ORG/NAME without a file extension."""
    if path.startswith("hub:") or _row(path.partition(":")[0]):
        return True
    return bool(_ORG_NAME.fullmatch(path)) and path.lower().rpartition(".")[2] not in _FILE_EXTENSIONS.split()


def open_table(source: Source, evaluation: bool = False, say: Say | None = None) -> HubTable:
    """The data set a source names, downloaded on first use."""
    source, row = _complete_source(source, evaluation)
    repo, split = source.path, str(source.split)
    offline = offline_reason(say)
    with hub_errors_as_user_errors(repo, f"datasets/{repo}", source.revision):
        builder = _from_cache(source, offline) if offline else _from_hub(source)
        try:
            table = builder.as_dataset(split=split)
        except (ValueError, AssertionError) as error:
            raise UserError(f"{repo}: split {printable(split)}: {printable(error, 200)}") from None
    config = builder.config.name
    content = hashlib.sha256("\n".join((repo, builder.hash, config, split)).encode())
    columns = tuple(table.column_names)
    name = f"{repo} ({config}, {split})"
    return HubTable(name, table.num_rows, columns, content.hexdigest(), row.columns, row.lines, table)


def tokenizer_folder(model: str, revision: str | None = None, say: Say | None = None) -> Path:
    """The local folder with a hub model's tokenizer files, downloaded on first use."""
    from huggingface_hub import snapshot_download, utils
    from huggingface_hub.errors import LocalEntryNotFoundError

    model = model.removeprefix("hub:")
    offline = offline_reason(say)
    silence_logging(utils)
    files = [*_TOKENIZER_FILES.split(), "config.json", "generation_config.json"]
    with hub_errors_as_user_errors(model, model, revision):
        try:
            folder = snapshot_download(model, revision=revision, allow_patterns=files, local_files_only=bool(offline))
        except LocalEntryNotFoundError:
            if offline:
                raise not_cached_error(f"the tokenizer of {model}", offline) from None
            raise
    if not any(Path(folder, name).is_file() for name in files[:2]):
        raise UserError(f"{model} has no {files[0]} and no {files[1]}; name a model or a folder that has one")
    return Path(folder)


def _row(name: str) -> DatasetFacts | None:
    return next((row for row in datasets() if normalize(row.name) == normalize(name)), None)


def _complete_source(source: Source, evaluation: bool) -> tuple[Source, DatasetFacts]:
    """The source with path, config and split filled in from the catalogue (config may stay None), and its row there."""
    path = source.path.removeprefix("hub:")
    short, _, config = path.partition(":")
    row, named = _row(short), _ORG_NAME.fullmatch(path)
    if row is None and named is None:
        guess = did_you_mean(short, [row.name for row in datasets()])
        raise UserError(f"{printable(source.path)}: not a data set's name on the hub, which is ORG/NAME{guess}")
    row = row or DatasetFacts("", short, "", "")
    split = source.split or (row.eval_split if evaluation else row.split)
    if split is None:
        hint = "in a YAML file, eval_sources: [{path: NAME, split: SPLIT}]"
        raise UserError(f"{printable(source.path)}: its evaluation split is not known; name it: {hint}")
    config = source.config or config or row.config or ""
    return source.model_copy(update={"path": row.hub, "config": config or None, "split": split}), row


def _from_hub(source: Source) -> Any:
    """A builder with its data downloaded; its `hash` is the commit."""
    import datasets as library
    from huggingface_hub import HfApi, errors, hf_hub_download, utils

    silence_logging(library, utils)
    # Counting downloads contacts another host, and waits for it where a firewall blocks it.
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    repo = source.path
    info = HfApi().dataset_info(repo, revision=source.revision, timeout=10)
    if any(file.rfilename == f"{repo.split('/')[1]}.py" for file in info.siblings or ()):
        advice = "set its revision to refs/convert/parquet if it has one, or download its files and name them as a path"
        raise UserError(f"{repo} has a loading script, which is not run: {advice}")
    try:
        # Downloading the card makes the cache record the commit of this revision, which is needed offline.
        with suppress(errors.EntryNotFoundError):
            hf_hub_download(repo, "README.md", repo_type="dataset", revision=source.revision)
        return _download(source, str(info.sha))
    except (FileNotFoundError, PermissionError, errors.RepositoryNotFoundError):
        if info.gated:
            raise gated_error(repo, f"datasets/{repo}") from None
        raise


def _download(source: Source, commit: str) -> Any:
    import datasets as library

    # Without the prefix, a local folder of that name would be read instead.
    name = f"hf://datasets/{source.path}" if Path(source.path).is_dir() else source.path
    try:
        builder = library.load_dataset_builder(name, source.config, revision=commit)
    except ValueError as error:
        _check_choice("config", source.config, library.get_dataset_config_names(name, revision=commit), source.path)
        raise unreadable_error(source.path, error) from None
    if builder.hash != commit:  # the library fell back to an older cached copy after a connection error
        raise ConnectionError("the download is incomplete")
    _check_split(source, builder.config.data_files or builder.info.splits or {})
    builder.download_and_prepare()
    return builder


def _from_cache(source: Source, offline: str) -> Any:
    """The same builder from the cache of an earlier download: ORG___NAME/CONFIG/VERSION/COMMIT."""
    import datasets as library
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    silence_logging(library)
    owner, name = source.path.split("/")
    home = expand_user(library.config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(name)}"
    cached = [p for p in home.glob("*/*/*") if _COMMIT.fullmatch(p.name) and (p / "dataset_info.json").is_file()]
    matching = sorted((p for p in cached if source.config in (None, p.parts[-3])), key=lambda p: p.stat().st_mtime)
    commit = _recorded_commit(source)
    if source.revision is None and matching and commit not in {p.name for p in matching}:
        commit = matching[-1].name
    by_config = {p.parts[-3]: p for p in matching if p.name == commit}
    config = source.config or _default_config(source.path, commit, list(by_config))
    if config not in by_config:
        others = ", ".join(sorted({p.parts[-3] for p in cached}))
        what = ", ".join(filter(None, (source.path, config, source.revision)))
        raise not_cached_error(what + (f" (cached: {others})" if others else ""), offline)
    version = by_config[config].parts[-2]
    builder = Cache(dataset_name=name, repo_id=source.path, config_name=config, version=version, hash=commit)
    _check_split(source, builder.info.splits or {})
    return builder


def _recorded_commit(source: Source) -> str:
    """The commit of a branch or tag when it was last downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    revision = source.revision or "main"
    ref = Path(HF_HUB_CACHE, f"datasets--{source.path.replace('/', '--')}", "refs", revision)
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision


def _default_config(repo: str, commit: str, cached: list[str]) -> str:
    """The default of the data set's card, as it would be online; without a card, the only one in the cache."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    card = try_to_load_from_cache(repo, "README.md", repo_type="dataset", revision=commit)
    configs: Any = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data) if isinstance(card, str) else {}
    if configs and (default := configs.get_default_config_name()):
        return str(default)
    _check_choice("config", None, configs or cached, repo)
    return cached[0] if cached else ""


def _check_split(source: Source, known: Iterable[str]) -> None:
    """Every part of `train[:10%]+test`; `all` means every split."""
    for part in str(source.split).split("+"):
        name = part.partition("[")[0].strip()
        if name != "all":
            _check_choice("split", name, map(str, known), source.path)


def _check_choice(what: str, given: str | None, known: Iterable[str], repo: str) -> None:
    names = list(known)
    there = f"there are: {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
    if given is None and len(names) > 1:
        raise UserError(f"{repo} has more than one {what}: write {repo}:{names[0]} or another; {there}")
    if given is not None and given not in names:
        raise UserError(f"{repo} has no {what} {printable(given)}{did_you_mean(given, names)}; {there}")
