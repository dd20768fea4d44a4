"""Exports a model: open it, write the format, replay it beside its source, write the card, put it in place. An export
that drifts is not put in place."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sojourn import __version__
from sojourn.errors import RunFailed, UserError
from sojourn.export.card import model_card
from sojourn.export.combine import Combine
from sojourn.export.formats import Format, default_name, find_format
from sojourn.export.hf import TOKENIZER_FILES
from sojourn.export.open_source import Source, open_weights
from sojourn.export.own_code import is_known
from sojourn.export.progress import NoProgress, Progress
from sojourn.export.reference import Reference, load_reference, save_reference
from sojourn.export.replay import GateResult, replay_export
from sojourn.export.source_reference import source_reference
from sojourn.export.stage import MANIFEST, ExportStage
from sojourn.infer.weight_source import file_stamp
from sojourn.run.home import home
from sojourn.storage.files import read_json_object

VERSION = 1  # of the manifest
CARD = "README.md"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@dataclass(frozen=True)
class ExportRequest:
    """As typed. `keep_rejected`: an export that drifts stays beside its target, as NAME.rejected. `data`: see
    `Source`."""

    model: str
    format: str = "hf"
    quantization: str | None = None
    out: Path | None = None
    checkpoint: str | None = None
    adapters: tuple[tuple[str, float], ...] = ()
    base: str | None = None
    combine: Combine = field(default_factory=Combine)
    overwrite: bool = False
    keep_rejected: bool = False
    data: str | None = None


@dataclass(frozen=True)
class Exported:
    """`is_new`: False where the same export was there already."""

    path: Path
    manifest: dict[str, Any]
    is_new: bool = True


def export(request: ExportRequest, progress: Progress | None = None) -> Exported:
    progress = progress or NoProgress()
    format = find_format(request.format)
    quantization, write = format.check_quantization(request.quantization), format.writer()
    source = open_weights(request.model, request.checkpoint, request.adapters, request.base, request.combine)
    _refuse_code(source, format, quantization, request.model)
    format.check(source, progress)
    source = replace(source, data=request.data)
    target = request.out or home() / "exports" / default_name(source.name, format, quantization)
    fingerprint = _fingerprint(source, format, quantization)
    there = read_json_object(target / MANIFEST)
    if there.get("fingerprint") == fingerprint and not request.overwrite:
        return Exported(target, there, is_new=False)
    with _disk_errors(target), ExportStage(target, fingerprint, progress, request.overwrite) as stage:
        seconds: dict[str, float] = {}
        with _timed(seconds, "reference"):  # first: what the source lacks shows before anything large is written
            reference = _reference(source, stage, progress)
        with _timed(seconds, "write"):
            write(source, stage, quantization, progress)
        stage.start_hashing()
        with _timed(seconds, "replay"), format.ready_for_replay(source, stage, progress):
            what = (stage.path, format.name, quantization, reference, progress.say)
            result = replay_export(*what, weights=source.weights, trust_remote_code=source.code is not None)
        _refuse_drift(result, stage, request.keep_rejected)
        measured, measure = {}, format.measurer()
        if measure is not None:
            with _timed(seconds, "measure"):
                measured = {"measured": measure(source, stage, quantization, progress)}
        if _fingerprint(source, format, quantization) != fingerprint:
            stage.discard()
            raise RunFailed(f"{source.path}: the model changed while it was exported; run the same command again")
        return _finish(source, stage, format, quantization, {"gate": result.facts(), "seconds": seconds, **measured})


def _refuse_code(source: Source, format: Format, quantization: str, model: str) -> None:
    if source.code is not None and format.name != "hf" and not is_known(source.weights.config):
        raise UserError(
            f"--to {quantization if format.measure else format.name}: {source.name} needs its own Python code, which "
            f"goes with --to hf alone: sojourn export {model} --to hf"
        )


def _reference(source: Source, stage: ExportStage, progress: Progress) -> Reference:
    """That of an interrupted call, where there is one: a large model takes minutes."""

    def write(folder: Path) -> None:
        progress.say("computing what the source says to the probes")
        save_reference(source_reference(source, progress.say), folder)

    stage.group("probes", write)
    return load_reference(stage.path)


def _refuse_drift(result: GateResult, stage: ExportStage, keep: bool) -> None:
    if result.drift is None:
        return
    kept = stage.target.with_name(f"{stage.target.name}.rejected") if keep else None
    stage.discard(kept)
    after = f"kept in {kept}" if kept is not None else "nothing was written; to look into it: --keep-rejected"
    raise RunFailed(f"{stage.target.name}: the export differs from its source: {result.drift}; {after}")


def _finish(
    source: Source, stage: ExportStage, format: Format, quantization: str, found: dict[str, dict[str, Any]]
) -> Exported:
    """Card, manifest, rename. `found`: what the gate says, the seconds of this call, what was measured."""
    stage.remove(CARD)  # of an interrupted call
    card = model_card(stage.target.name, format, quantization, source.lineage, found, stage.files)
    stage.text(CARD, card)
    what = {"version": VERSION, "sojourn": __version__, "format": format.name, "quantization": quantization}
    path = stage.finish({**what, "lineage": source.lineage, **found})
    return Exported(path, read_json_object(path / MANIFEST))


def _fingerprint(source: Source, format: Format, quantization: str) -> str:
    """Of everything that the files are made from."""
    weights = source.weights
    files = (weights.tokenizer_folder / name for name in TOKENIZER_FILES)
    tokenizer = [file_stamp(path) for path in files if path.is_file()]
    data = [source.data, file_stamp(Path(source.data))] if source.data and Path(source.data).is_file() else source.data
    code = {path.name: file_stamp(path) for path in sorted(source.code.folder.glob("*.py"))} if source.code else None
    facts = [source.fingerprint, data, weights.config, weights.generation_config, tokenizer, format.name, quantization]
    facts += [code] if code is not None else []
    return hashlib.sha256(json.dumps([*facts, __version__], sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - began, 3)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunFailed(
            f"{target.absolute().parent}: no space left on this disk; free some, then run the same command: it goes on "
            "where it was; or choose another disk: --out DIR"
        ) from None
