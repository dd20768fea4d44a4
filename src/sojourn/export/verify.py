"""Checks an export without its source: its files by their SHA-256, then its stored probes in a runtime. A folder that
another program wrote is compared with a model that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import RunFailed, UserError
from sojourn.export.export import VERSION
from sojourn.export.formats import FORMATS
from sojourn.export.reference import load_reference
from sojourn.export.replay import GateResult, replay_export
from sojourn.export.stage import MANIFEST
from sojourn.storage.files import NotValid, file_size, is_plain_name, load_json, sha256
from sojourn.storage.gguf_header import check_gguf

Say = Callable[[str], None]


@dataclass
class Verdict:
    """`damage`: the first file that is not as the export wrote it, and how many there are."""

    folder: Path
    format: str
    quantization: str
    files: int = 0
    damage: str | None = None
    extra: list[str] = field(default_factory=list)
    gate: GateResult | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line."""
        if self.damage is not None:
            return self.damage
        if self.gate is None:
            return None
        if self.gate.drift is None and self.gate.replay is None:
            return f"its files are as written, but nothing here can replay it: {self.gate.notes[-1]}"
        return self.gate.drift

    def summary(self) -> str:
        """Of a verdict without a problem."""
        replay = self.gate.replay if self.gate is not None else None
        assert replay is not None  # noqa: S101
        files = f"{self.files} files as written; " if self.files else ""
        return f"{self.folder}: {files}{replay.summary()}"

    def facts(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder), "format": self.format, "quantization": self.quantization,
            "verified": self.problem is None, "problem": self.problem, "files": self.files, "extra": self.extra,
            "gate": self.gate.facts() if self.gate is not None else None,
        }  # fmt: skip


def verify_export(folder: Path, say: Say, runtimes: Sequence[str] | None = None) -> Verdict:
    """Raises `UserError` where `folder` is no export, `RunFailed` where its record cannot be used."""
    record = read_manifest(folder)
    verdict = Verdict(folder, record["format"], record["quantization"], len(record["files"]))
    total = sum(facts["size"] for facts in record["files"].values())
    say(f"checking {verdict.files} files, {total / 2**30:.1f} GiB")
    verdict.damage = _damage(folder, record["files"])
    if verdict.damage is not None:
        return verdict
    known = {MANIFEST, *record["files"]}
    verdict.extra = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in known)
    if verdict.extra:
        say(f"note: not written by the export: {', '.join(verdict.extra[:5])}")
    reference = load_reference(folder)
    verdict.gate = replay_export(folder, verdict.format, verdict.quantization, reference, say, runtimes)
    return verdict


def verify_against(folder: Path, model: str, say: Say, runtimes: Sequence[str] | None = None) -> Verdict:
    """For a folder or file that another program wrote."""
    from sojourn.export.open_source import open_weights
    from sojourn.export.source_reference import source_reference

    kind, quantization = recognise(folder)
    verdict = Verdict(folder, kind, quantization)
    reference = source_reference(open_weights(model), say)
    verdict.gate = replay_export(folder, kind, quantization, reference, say, runtimes)
    return verdict


def read_manifest(folder: Path) -> dict[str, Any]:
    """With `format`, `quantization` and `files`, checked."""
    path = folder / MANIFEST
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    try:
        found = load_json(path)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: not an export of sojourn (no {MANIFEST}), so there is nothing to compare it with; name its "
            f"source: sojourn verify {folder} --against MODEL"
        ) from None
    except NotValid as error:
        raise RunFailed(f"{path}: {error}; copy the folder again") from None
    version = found.get("version", VERSION) if isinstance(found, dict) else None
    if not (isinstance(found, dict) and isinstance(found.get("format"), str) and _is_file_list(found.get("files"))):
        raise RunFailed(f"{path}: not a record of an export; copy the folder again")
    if type(version) is not int or version > VERSION or found["format"] not in FORMATS:
        raise RunFailed(
            f"{folder}: written by a newer sojourn (record {version}, format {printable(found['format'])}); "
            "run: pip install -U sojourn"
        )
    return {**found, "quantization": str(found.get("quantization"))}


def _is_file_list(files: Any) -> bool:
    return isinstance(files, dict) and all(
        all(map(is_plain_name, PurePosixPath(name).parts))
        and isinstance(facts, dict)
        and type(facts.get("size")) is int
        and isinstance(facts.get("sha256"), str)
        for name, facts in files.items()
    )


def _damage(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """Sizes of all files first: that takes no time."""
    found = [reason for name, facts in files.items() if (reason := _wrong_size(folder / name, facts["size"]))]
    if not found:
        for name, facts in files.items():
            if sha256(folder / name) != facts["sha256"]:
                found.append(f"{folder / name}: changed since the export (its SHA-256 differs)")
    if not found:
        return None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}; copy the folder again, or export anew"


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        size = file_size(path)
    except FileNotFoundError:
        return f"{path}: missing"
    except NotValid as error:
        return f"{path}: {error}"
    return None if size == expected else f"{path}: {size:,} bytes, {expected:,} when it was exported"


def recognise(folder: Path) -> tuple[str, str]:
    """Format and quantization of a folder or file without our record."""
    from sojourn.infer.runtimes.transformers_runtime import gguf_file

    if not folder.exists():
        raise UserError(f"{folder}: no such folder or file")
    file = gguf_file(folder)
    if file is not None:
        return "gguf", _gguf_quantization(file)
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return "hf", "auto"
    raise UserError(f"{folder}: neither a model's folder (config.json) nor a GGUF file")


def _gguf_quantization(file: Path) -> str:
    """As the file says (general.file_type)."""
    import gguf

    kind = check_gguf(file).values.get("general.file_type", gguf.LlamaFileType.MOSTLY_F16)
    try:
        name: str = gguf.LlamaFileType(kind).name
    except ValueError:
        raise UserError(f"{file}: general.file_type is {printable(kind)}, which no GGUF file has") from None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
