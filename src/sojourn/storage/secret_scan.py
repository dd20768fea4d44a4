"""Looks for secrets in files before they travel: by name, and by what tokens and private keys look like.

The scan is bounded in bytes, so that it ends soon on any data, and says what it read. Weights are judged by name alone:
random bytes look like anything.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast

from sojourn.config.messages import printable
from sojourn.storage.sizes import format_size

_NAMES = (
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", "_netrc", ".env", ".env.*", "*.env", "kaggle.json",
    ".git-credentials", ".npmrc", ".pypirc", ".htpasswd", ".pgpass", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk",
    "*.kdbx", "credentials", "token", "secrets.json", "secrets.y*ml", "secrets.toml",
)  # fmt: skip
_PARENTS = (".ssh", ".aws", ".gnupg", ".kaggle")
_PRIVATE_KEY = rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
_END = rb"(?![A-Za-z0-9_-])"
_START = rb"(?<![A-Za-z0-9_])"
# What a text must contain before its pattern is tried: a search for a constant is a hundred times as fast.
_PATTERNS: tuple[tuple[bytes, str, re.Pattern[bytes]], ...] = tuple(
    (literal, kind, re.compile(pattern))
    for literal, kind, pattern in (
        (b"PRIVATE KEY", "a private key", _PRIVATE_KEY),
        (b"hf_", "a Hugging Face token", _START + rb"hf_[A-Za-z0-9]{30,}" + _END),
        (b"sk-", "an API key (sk-…)", _START + rb"sk-(?=[A-Za-z0-9_-]*[0-9])(?=[A-Za-z0-9_-]*[A-Z])[A-Za-z0-9_-]{24,}"),
        (b"ghp_", "a GitHub token", _START + rb"ghp_[A-Za-z0-9]{36}" + _END),
        (b"gho_", "a GitHub token", _START + rb"gho_[A-Za-z0-9]{36}" + _END),
        (b"ghs_", "a GitHub token", _START + rb"ghs_[A-Za-z0-9]{36}" + _END),
        (b"github_pat_", "a GitHub token", _START + rb"github_pat_[A-Za-z0-9_]{40,}"),
        (b"glpat-", "a GitLab token", _START + rb"glpat-[A-Za-z0-9_-]{20,}"),
        (b"AKIA", "an AWS access key", _START + rb"AKIA[0-9A-Z]{16}" + _END),
        (b"ASIA", "an AWS access key", _START + rb"ASIA[0-9A-Z]{16}" + _END),
        (b"AIza", "a Google API key", _START + rb"AIza[A-Za-z0-9_-]{35}" + _END),
        (b"xox", "a Slack token", _START + rb"xox[abprs]-[0-9A-Za-z-]{20,}"),
        (b"KGAT_", "a Kaggle token", _START + rb"KGAT_[0-9a-f]{32}" + _END),
        (b"rpa_", "a RunPod key", _START + rb"rpa_[A-Za-z0-9]{30,}" + _END),
    )
)
_EXAMPLE = re.compile(rb"EXAMPLE|(.)\1{7}|x{5}|X{5}")  # AKIAIOSFODNN7EXAMPLE, hf_xxxxxxxx: of manuals
_UNREADABLE = (
    ".parquet", ".zst", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npy", ".arrow", ".model", ".whl", ".zip",
)  # fmt: skip
_BLOCK = 1 << 20
_OVERLAP = 256
FILE_BYTES = 16 << 20
TOTAL_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True)
class Scan:
    findings: tuple[Finding, ...]
    files: int = 0
    bytes_read: int = 0
    partly: int = 0
    by_name: int = 0

    def describe(self) -> str:
        """What was read."""
        parts = [f"{self.files} file{'' if self.files == 1 else 's'} read ({format_size(self.bytes_read)})"]
        if self.partly:
            parts.append(f"{self.partly} of them in part, as they are large")
        if self.by_name:
            parts.append(f"{self.by_name} judged by name only (weights, prepared or compressed data)")
        return "looked for secrets: " + ", ".join(parts)


def scan_files(files: Iterable[Path]) -> Scan:
    """At most `FILE_BYTES` of each file (start, end, and between them at even distances) and `TOTAL_BYTES` of all."""
    findings: list[Finding] = []
    read, count, partly, by_name = 0, 0, 0, 0
    for file in sorted(set(files)):
        what = secret_by_name(file)
        budget = min(FILE_BYTES, TOTAL_BYTES - read)
        if what is None and (file.suffix.lower() in _UNREADABLE or budget < 2 * _BLOCK):
            by_name += 1
        elif what is None:
            what, size, whole = _scan_file(file, budget)
            read, count, partly = read + size, count + 1, partly + (not whole)
        if what is not None:
            findings.append(Finding(printable(file, 200), what))
    return Scan(tuple(findings), count, read, partly, by_name)


def secret_by_name(file: Path) -> str | None:
    """What a file is by its name, or by the name of what it links to."""
    for path in {file, file.resolve()}:
        if any(fnmatchcase(path.name.lower(), pattern) for pattern in _NAMES):
            return f"{path.name} is a file of secrets by its name"
        if path.parent.name in _PARENTS:
            return f"in {path.parent.name}, a folder of secrets"
    return None


def secret_in(text: bytes) -> str | None:
    """The kind of the first secret, and how it starts; never all of it."""
    for literal, kind, pattern in _PATTERNS:
        if literal not in text:
            continue
        for match in pattern.finditer(text):
            if not _EXAMPLE.search(match[0]):
                return f"{kind} ({match[0][:8].decode(errors='replace')}…)"
    return None


def _scan_file(file: Path, most: int) -> tuple[str | None, int, bool]:
    """What was found, the bytes read, and whether that was all of the file."""
    try:
        if file.suffix.lower() == ".gz":
            with gzip.open(file, "rb") as stream:
                return _scan_start(cast(BinaryIO, stream), most)
        with file.open("rb") as stream:
            size = file.stat().st_size
            return _scan_start(stream, most) if size <= most else _scan_spread(stream, size, most)
    except (OSError, EOFError):  # a damaged file is refused by those who read it for training
        return None, 0, False


def _scan_start(stream: BinaryIO, most: int) -> tuple[str | None, int, bool]:
    read, tail = 0, b""
    while read < most and (block := stream.read(min(_BLOCK, most - read))):
        read += len(block)
        if what := secret_in(tail + block):
            return what, read, False
        tail = block[-_OVERLAP:]
    return None, read, not stream.read(1)


def _scan_spread(stream: BinaryIO, size: int, most: int) -> tuple[str | None, int, bool]:
    blocks = max(2, most // _BLOCK)
    read = 0
    for index in range(blocks):
        stream.seek((size - _BLOCK) * index // (blocks - 1))
        block = stream.read(_BLOCK)
        read += len(block)
        if what := secret_in(block):
            return what, read, False
    return None, read, False
