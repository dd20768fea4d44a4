"""Our own wheel from the package that runs here, without network or a build tool: the box gets exactly this code."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sojourn.errors import UserError

_DATE = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes, so that a hash says whether anything changed
_SKIPPED = {"__pycache__", ".DS_Store"}
_WHEEL = "Wheel-Version: 1.0\nGenerator: sojourn\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(folder: Path, package: Path | None = None) -> Path:
    """Writes sojourn-VERSION-py3-none-any.whl into the folder, from the package that runs here."""
    package = package or Path(__file__).parents[1]
    headers, scripts = _describe(package)
    version = _field(headers, "Version")
    info = f"sojourn-{version}.dist-info"
    files = dict(_package_files(package))
    files[f"{info}/METADATA"] = headers.encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    lines = [f"{name} = {target}" for name, target in sorted(scripts.items())]
    files[f"{info}/entry_points.txt"] = ("[console_scripts]\n" + "\n".join(lines) + "\n").encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    target = folder / f"sojourn-{version}-py3-none-any.whl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = target.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(_archive(files))
        new.replace(target)
    except OSError as error:
        raise UserError(f"{target}: our wheel cannot be written ({error.strerror or error})") from error
    return target


def requirements(headers: str, extra: str | None = None) -> list[str]:
    """What METADATA requires always and with one extra, without the clause about the extra."""
    found = []
    for line in headers.split("\n\n", 1)[0].splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        needed, _, marker = line[len("Requires-Dist: ") :].partition(";")
        match = re.search(r"""(?:\s+and\s+)?extra\s*==\s*['"]([^'"]+)['"]\s*$""", marker)
        if match and match[1] != extra:
            continue
        rest = (marker[: match.start()] if match else marker).strip()
        found.append(f"{needed.strip()}; {rest}" if rest else needed.strip())
    return found


def wheel_metadata(wheel: Path) -> str:
    return _read_info(wheel, "METADATA")


def wheel_digest(wheel: Path) -> str:
    """A hash of what is in it; the bytes of the file depend on the laptop's zlib."""
    return hashlib.sha256(_read_info(wheel, "RECORD").encode()).hexdigest()


def _read_info(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def _package_files(package: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package.parent).parts
        if not _SKIPPED.intersection(parts) and path.suffix not in (".pyc", ".pyo") and path.is_file():
            yield "/".join(parts), path.read_bytes()


def _describe(package: Path) -> tuple[str, dict[str, str]]:
    """METADATA's headers and the scripts. In a checkout, pyproject.toml is newer than what was installed from it."""
    checkout = package.parents[1] / "pyproject.toml"
    if package.parent.name == "src" and checkout.is_file():
        project = _toml().loads(checkout.read_text(encoding="utf-8"))["project"]
        return _headers(project), dict(project["scripts"])
    try:
        installed = metadata.distribution("sojourn")
    except metadata.PackageNotFoundError as error:
        raise UserError("sojourn is not installed as a package here: pip install sojourn") from error
    scripts = {e.name: e.value for e in installed.entry_points if e.group == "console_scripts"}
    text = installed.read_text("METADATA") or ""
    return text.split("\n\n", 1)[0].rstrip("\n") + "\n", scripts


def _toml() -> Any:
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def _headers(project: Mapping[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {needed}" for needed in _spelled(project["dependencies"], None)]
    for extra, needs in sorted(project.get("optional-dependencies", {}).items()):
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {needed}" for needed in _spelled(needs, extra)]
    return "\n".join(lines) + "\n"


def _spelled(needs: Sequence[str], extra: str | None) -> Iterator[str]:
    for needed in needs:
        name, _, marker = (part.strip() for part in needed.partition(";"))
        clauses = [f"({marker})"] if marker and extra else [marker] if marker else []
        clauses += [f"extra == '{extra}'"] if extra else []
        yield f"{name}; {' and '.join(clauses)}" if clauses else name


def _field(headers: str, name: str) -> str:
    return next(line.partition(": ")[2] for line in headers.splitlines() if line.startswith(f"{name}: "))


def _record(files: Mapping[str, bytes], own: str) -> str:
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join([*rows, f"{own},,"]) + "\n"


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3  # as on Linux, wherever the laptop runs
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()
