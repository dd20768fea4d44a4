"""Before anything travels: the run as the box gets it, the files that go with it, and what would not work there.

Paths of this machine are rewritten (`travelling_files.py`); what cannot be rewritten safely is refused, with all
problems at once. The artefact's hash covers no path, so data that was prepared here is found there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.config.data import Source
from sojourn.config.load import to_yaml, with_settings
from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.data.sources.dataset_info import named_sources
from sojourn.data.tokenize.templates import NAMED
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.remote.travelling_files import Item, TravellingFiles
from sojourn.run.home import home, prepared_folder
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.secret_scan import Scan, scan_files, secret_in

Say = Callable[[str], None]
Settings = dict[str, Any]
_NEW_TOKENIZERS = ("auto", "bpe", "sentencepiece", "char")
_NEEDED_TO_PREPARE = ("numpy", "tokenizers", "jinja2")
_COMPLETE = "artefact.json"  # `prepare` takes a folder with it for complete


@dataclass(frozen=True)
class Destination:
    """The box. `home`: its persistent folder. `gpus`: 0 where not known. `disks`: its folders that survive."""

    home: str
    gpus: int = 0
    disks: tuple[str, ...] = ()

    @property
    def files(self) -> str:
        return f"{self.home.rstrip('/')}/.sojourn/files"

    @property
    def prepared(self) -> str:
        return f"{self.home.rstrip('/')}/prepared"


@dataclass(frozen=True)
class Shipment:
    """`config`: for the box. `items` travel first; `last_items` when all of them have arrived: they mark the prepared
    data as complete. `artefact`: the name of the prepared data, None where the box prepares it. `models`: those of this
    machine, by their paths on the box."""

    config: RunConfig
    items: tuple[Item, ...]
    last_items: tuple[Item, ...]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]
    scan: Scan
    artefact: str | None = None
    models: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(local.stat().st_size for local, _ in (*self.items, *self.last_items))

    def check(self) -> None:
        """Raises a UserError that names every refusal."""
        if self.refusals:
            raise UserError("; also: ".join(self.refusals))


def make_shipment(
    config: RunConfig,
    to: Destination,
    *,
    allow_secrets: bool = False,
    prepare: bool = True,
    say: Say = lambda line: None,
) -> Shipment:
    """`prepare`: prepare the data here, where the packages for that are installed."""
    cache = home() / "remote" / "digests.json"
    digests = FileDigests(cache, "the files to send")
    files = TravellingFiles(to.files, _project(), digests)
    changed = {**_files_of(config, files), **_machine_settings(config, to, files)}
    files.note_links()
    scan = scan_files(local for local, _ in files.items)
    _judge_secrets(config, scan, allow_secrets, files)
    artefact = _prepare_here(config, files, say) if prepare and not files.refusals else None
    cache.parent.mkdir(parents=True, exist_ok=True)
    digests.save()
    sealed = _artefact_items(artefact, to) if artefact else []
    return Shipment(
        with_settings(config, changed),
        (*files.items, *(item for item in sealed if item[0].name != _COMPLETE)),
        tuple(item for item in sealed if item[0].name == _COMPLETE),
        tuple(dict.fromkeys(files.notes)),
        tuple(dict.fromkeys(files.refusals)),
        scan,
        artefact.name if artefact else None,
        _models(config, changed),
    )


def _models(config: RunConfig, changed: Settings) -> dict[str, str]:
    given = {"model.base": config.model.base, "method.adapter": config.method.adapter}
    return {
        changed[key]: str(expand_user(path).absolute())
        for key, path in given.items()
        if path is not None and changed.get(key) not in (None, path)
    }


def _project() -> Path:
    """The working folder, or the repository around it."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _files_of(config: RunConfig, files: TravellingFiles) -> Settings:
    """The settings that name files, as they are on the box."""
    data, changed = config.data, Settings()
    for key, sources in (("data.sources", data.sources), ("data.eval_sources", data.eval_sources)):
        changed[key] = [_plain(files.data_source(one, key)) for one in _named(sources, data.dataset_dir, key, files)]
    if not data.sources:
        files.refusals.append("data.sources: nothing to read; set it, for example --train_file my.jsonl")
    if data.dataset_dir is not None:
        changed["data.dataset_dir"] = None  # its entries are in data.sources now
    tokenizer = None if data.tokenizer in _NEW_TOKENIZERS else data.tokenizer
    template = None if data.template in ("auto", *NAMED) else data.template
    for key, value, rewrite in (
        ("model.base", config.model.base, files.model),
        ("method.adapter", config.method.adapter, files.adapter),
        ("data.tokenizer", tokenizer, files.tokenizer),
        ("data.template", template, files.file),
        ("parallel.deepspeed", config.parallel.deepspeed, files.file),
    ):
        if value is not None:
            try:
                changed[key] = rewrite(value, key)
            except UserError as error:
                files.refusals.append(str(error))
    return changed


def _named(sources: Sequence[Source], folder: str | None, key: str, files: TravellingFiles) -> list[Source]:
    """With the names of LLaMA-Factory's dataset_info.json replaced by what they stand for."""
    try:
        return named_sources(list(sources), folder)
    except UserError as error:
        files.refusals.append(str(error).replace("data.sources:", f"{key}:", 1))
        return []


def _plain(source: Source) -> Settings:
    return source.model_dump(mode="json", exclude_none=True)


def _machine_settings(config: RunConfig, to: Destination, files: TravellingFiles) -> Settings:
    """Settings that name places or devices of one machine."""
    changed, save, gpus = Settings(), config.save, config.parallel.gpus
    if save.folder is not None:
        changed["save.folder"] = None
        files.notes.append(
            f"save.folder: {printable(save.folder)} is not used; on the box the run is in {to.home}/runs"
        )
    if config.advanced.compile_cache is not None:
        changed["advanced.compile_cache"] = None
        files.notes.append("advanced.compile_cache is not used; on the box it is in the run folder")
    if save.mirror is not None and (problem := _mirror_problem(save.mirror, to)):
        files.refusals.append(problem)
    if save.resume != "auto":
        try:
            changed["save.resume"] = _resume(save.resume, to, files)
        except UserError as error:
            files.refusals.append(str(error))
    if config.train.device == "mps":
        changed["train.device"] = "auto"
        files.notes.append("train.device: mps is this machine's; auto on the box")
    elif config.train.device == "cpu":
        files.notes.append("train.device: cpu: the box's GPU would not be used; leave it out to use it")
    if isinstance(gpus, list) and to.gpus and max(gpus) >= to.gpus:
        given, there = ",".join(map(str, gpus)), "GPU 0 only" if to.gpus == 1 else f"GPUs 0 to {to.gpus - 1}"
        files.refusals.append(f"parallel.gpus: {given} given, but the box has {there}; leave it out to use all")
    return changed


def _mirror_problem(mirror: str, to: Destination) -> str | None:
    """A mirror is a folder of the box, or on the hub: checkpoints are copied there while this machine may be off."""
    of_box = any(mirror == folder or mirror.startswith(f"{folder.rstrip('/')}/") for folder in (*to.disks, to.home))
    if of_box or mirror.startswith("hub:") or (mirror.startswith("/") and not Path(mirror).exists()):
        return None
    known = [*(disk for disk in to.disks if disk != to.home), *([to.home] if to.home.startswith("/") else [])]
    example = f", such as save.mirror={known[0]}" if known else ""
    what = "a path of this machine" if expand_user(mirror).exists() else "not a full path of the box"
    return (
        f"save.mirror: {printable(mirror)}: {what}; write a folder of the box{example}, "
        "or save.mirror=hub:USER/REPOSITORY"
    )


def _resume(value: str, to: Destination, files: TravellingFiles) -> str:
    if value.startswith(f"{to.home.rstrip('/')}/") and not Path(value).exists():
        return value  # a checkpoint of the box
    return files.checkpoint(value, "save.resume")


def _judge_secrets(config: RunConfig, scan: Scan, allow: bool, files: TravellingFiles) -> None:
    found = [str(one) for one in scan.findings]
    if what := secret_in(to_yaml(config).encode(errors="replace")):
        found.append(f"the settings of the run: {what}")
    files.notes.append(scan.describe())
    if found and allow:
        files.notes.append(f"--allow-secrets: sent all the same: {'; '.join(found)}")
    elif found:
        files.refusals.extend(f"{one}: not sent; remove it, or allow it: --allow-secrets" for one in found)


def _prepare_here(config: RunConfig, files: TravellingFiles, say: Say) -> Path | None:
    """The folder of the prepared data; None where the box has to prepare it."""
    missing = [name for name in _NEEDED_TO_PREPARE if importlib.util.find_spec(name) is None]
    on_hub = [key for key in files.from_hub if key in ("data.sources", "data.eval_sources")]
    if missing or on_hub:
        why = f"{', '.join(missing)} not installed here" if missing else "its sources are on the hub"
        files.notes.append(f"the box prepares the data: {why}")
        return None
    from sojourn.data.prepare import prepare_run
    from sojourn.data.settings import data_settings
    from sojourn.data.tokenize.tokenizer import open_tokenizer

    if files.from_hub:  # which the box may reach where this machine does not
        try:
            open_tokenizer(data_settings(config).tokenizer)
        except UserError as error:
            files.notes.append(f"the box prepares the data: {printable(error, 160)}")
            return None
    try:
        return prepare_run(config, prepared_folder(), say).path
    except UserError as error:
        if "pip install" not in str(error):
            raise
        files.notes.append(f"the box prepares the data: {printable(error, 160)}")
        return None


def _artefact_items(artefact: Path, to: Destination) -> list[Item]:
    return [
        (file, f"{to.prepared}/{artefact.name}/{file.relative_to(artefact).as_posix()}")
        for file in sorted(artefact.rglob("*"))
        if file.is_file()
    ]
