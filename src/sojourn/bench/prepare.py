"""`sojourn bench prepare`: speed and memory of preparation, against `datasets.map` and the bare tokenizer.

Each row runs in a fresh process on the same synthetic chats, with the same tokenizer and as many workers. `sojourn`
prepares; `tokenizer` is the lower bound, `encode_batch_fast` alone on rendered texts; `datasets` is the peer.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sojourn.bench.peers import load_peers, require_peers
from sojourn.bench.prepare_rows import prepare_args, read_chats
from sojourn.bench.prepare_settings import ROW_LENGTH
from sojourn.bench.process_memory import run_sampled
from sojourn.config.quantities import Size
from sojourn.errors import RunFailed, UserError
from sojourn.train.metrics.environment import version_of

Print = Callable[[str], None]
Row = dict[str, Any]

_MIN_BYTES = 500_000
_DISK_FACTOR = 4  # the corpus, the artefact, the peer's two sets of Arrow files
_TOKENIZER_BYTES, _TOKENIZER_VOCAB = 8_000_000, 32_000
_SECOND_CALLS = 3
_PACKAGES = ("sojourn", "tokenizers", "datasets", "transformers", "numpy", "pyarrow")

MIN_SPEED_UP, MIN_TOKENIZER_SHARE, MAX_MEMORY, MAX_SECOND_CALL, MAX_MEMORY_GROWTH = 2.0, 0.8, 2**30, 1.0, 1.25


@dataclass(frozen=True)
class PrepareBench:
    """What to measure. `flat`: further corpus sizes at which only our own memory is measured."""

    size: int
    flat: tuple[int, ...]
    tokenizer: Path | None
    workers: int
    peer: bool
    folder: Path


def make_bench(
    size: str, flat: str, tokenizer: Path | None, workers: int | None, peer: bool | None, folder: Path
) -> PrepareBench:
    """`peer`: None takes it where its script is at hand."""
    from sojourn.machine.hardware import cpu

    sizes = tuple(_size("--flat", part) for part in flat.split(",") if part.strip())
    if peer:
        require_peers()
    elif peer is None:
        peer = load_peers() is not None
    bench = PrepareBench(_size("--size", size), sizes, tokenizer, workers or max(1, int(cpu().usable)), peer, folder)
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise UserError(f"--tokenizer: {tokenizer}: no folder with a tokenizer.json")
    if not folder.is_dir():
        raise UserError(f"--folder: {folder}: no such folder")
    missing = [name for name in ("datasets", "transformers") if find_spec(name) is None]
    if peer and missing:
        raise UserError(f"the peer needs {' and '.join(missing)}: install it, or leave the peer out with --no-peer")
    needed, free = _DISK_FACTOR * max(bench.size, *sizes, 0), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"--folder: {folder}: {free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed (four times the "
            "largest size); choose another, or smaller sizes"
        )
    return bench


def _size(flag: str, text: str) -> int:
    try:
        size = int(Size.parse(text))
    except ValueError as error:
        raise UserError(f"{flag}: “{text}” given; {error}") from None
    if size < _MIN_BYTES:
        raise UserError(f"{flag}: “{text}” given; the minimum is 500kB")
    return size


def measure(bench: PrepareBench, echo: Print) -> dict[str, Any]:
    """Runs all rows; prints each as it ends. Nothing is left in the folder, however it ends."""
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-", dir=bench.folder) as folder:
        work, rows = Path(folder), list[Row]()
        echo(f"{'':<22}{'documents':>12}{'tokens':>15}{'seconds':>10}{'tokens/s':>12}{'peak MiB':>10}")
        corpus, chats = _corpus(work, bench.size)
        tokenizer = _tokenizer(bench, corpus, work)

        def add(name: str, corpus: Path) -> Row:
            row = _row(name, corpus, tokenizer, bench.workers, work)
            rows.append(row)
            echo(format_row(row))
            return row

        ours = add("sojourn", corpus)
        tokenizer_row = add("tokenizer", corpus)
        peer = add("datasets", corpus) if bench.peer else None
        _check(chats, ours, tokenizer_row, peer)
        rows.append(_second_call(ours, corpus, tokenizer, bench.workers, work))
        echo(format_row(rows[-1]))
        for size in bench.flat:
            corpus.unlink()
            shutil.rmtree(work / "home")
            corpus, chats = _corpus(work, size)
            _check(chats, add("sojourn", corpus), None, None)
    checks = _checks(rows)
    for check in checks:
        echo(f"{check['name']}: {check['value']} ({check['target']}): {'pass' if check['pass'] else 'fail'}")
    return {**_describe_environment(bench), "rows": rows, "checks": checks}


def format_row(row: Row) -> str:
    name = row["name"] if row["name"] == "second call" else f"{row['name']}, {row['bytes'] / 1e6:,.0f} MB"
    memory = f"{row['peak_memory'] / 2**20:,.0f}" if "peak_memory" in row else ""
    tokens = [f"{row[key]:,}" if key in row else "" for key in ("documents", "tokens")]
    rate = f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else ""
    return f"{name:<22}{tokens[0]:>12}{tokens[1]:>15}{row['seconds']:>10.2f}{rate:>12}{memory:>10}"


def _corpus(work: Path, size: int) -> tuple[Path, int]:
    from sojourn.bench.synthetic_chats import write_synthetic_chats
    from sojourn.storage.disk import sync_file

    path = work / "chats.jsonl"
    chats = write_synthetic_chats(path, size)
    sync_file(path)  # so that no row competes with its writing
    facts = path.stat()
    # The hash of a file that has just changed is not cached, since it may change again; a user's file is older.
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns - 10**10))
    return path, chats


def _tokenizer(bench: PrepareBench, corpus: Path, work: Path) -> Path:
    """The folder of the tokenizer that all rows use, with its template as transformers expects it."""
    from sojourn.config.data import DataConfig
    from sojourn.data.tokenize.tokenizer import open_tokenizer, train_tokenizer

    folder = work / "tokenizer"
    if bench.tokenizer is not None:
        bundle = open_tokenizer(bench.tokenizer)
        bundle.save(folder, bundle.template("auto"), ROW_LENGTH)
        return folder
    data = DataConfig.model_validate({"tokenizer": "bpe", "vocab_size": _TOKENIZER_VOCAB})
    texts = (message.content for chat in read_chats(corpus, _TOKENIZER_BYTES) for message in chat)
    bundle = train_tokenizer(data, texts, folder)
    bundle.save(folder, bundle.template("chatml"), ROW_LENGTH)
    return folder


def _row(name: str, corpus: Path, tokenizer: Path, workers: int, work: Path) -> Row:
    """One row in its own process."""
    task, out, log = work / "task.json", work / "row.json", work / "log.txt"
    fields = {
        "corpus": str(corpus), "tokenizer": str(tokenizer), "workers": workers, "home": str(work / "home"),
        "cache": str(work / "cache"), "out": str(out),
    }  # fmt: skip
    task.write_text(json.dumps(fields), encoding="utf-8")
    command = [sys.executable, "-c", "from sojourn.bench.prepare_rows import main; main()", name, str(task)]
    try:
        code, memory = run_sampled(command, _environment(work, workers, name), log)
        if code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunFailed(f"{name} ended with exit code {code}: {lines[-1] if lines else 'no output'}")
        row = json.loads(out.read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(work / "cache", ignore_errors=True)
    return {
        "name": name, "bytes": corpus.stat().st_size, **row, "seconds": round(row["seconds"], 3),
        "tokens_per_second": round(row["tokens"] / row["seconds"]), "peak_memory": memory.pss, "peak_rss": memory.rss,
        "memory_kind": memory.kind, "memory_samples": memory.samples,
    }  # fmt: skip


def _environment(work: Path, workers: int, name: str = "") -> dict[str, str]:
    variables = {
        "PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": str(workers), "SOJOURN_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"),
    }  # fmt: skip
    if name == "datasets" and workers > 1:  # it runs processes in parallel; threads in each would compete
        variables["TOKENIZERS_PARALLELISM"] = "false"
    return {**os.environ, **variables}


def _second_call(ours: Row, corpus: Path, tokenizer: Path, workers: int, work: Path) -> Row:
    """The whole command with Python's start-up; the slowest of a few calls."""
    command = [
        sys.executable,
        "-m",
        "sojourn",
        "prepare",
        *prepare_args(str(corpus), str(tokenizer), workers),
        "--json",
    ]
    seconds = 0.0
    for _ in range(_SECOND_CALLS):
        began = time.perf_counter()
        done = subprocess.run(command, env=_environment(work, workers), capture_output=True, text=True, check=False)
        seconds = max(seconds, time.perf_counter() - began)
        if done.returncode:
            raise RunFailed(f"the second call ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        if (path := json.loads(done.stdout)["path"]) != ours["path"]:
            raise RunFailed(f"the second call prepared {path} again, instead of reusing {ours['path']}")
    return {"name": "second call", "bytes": ours["bytes"], "seconds": round(seconds, 3), "calls": _SECOND_CALLS}


def _check(chats: int, ours: Row, tokenizer_row: Row | None, peer: Row | None) -> None:
    """All rows must have done the same work, to the last token."""
    counts = [("documents read by sojourn", ours["records"], chats)]
    if tokenizer_row and tokenizer_row["bytes"] == ours["bytes"]:  # else it read only a part
        counts.append(("documents read by the tokenizer", tokenizer_row["documents"], chats))
        if not ours["truncated"]:
            counts.append(("tokens of the tokenizer", tokenizer_row["tokens"], ours["tokens"]))
    if peer:
        keys = ("records", "documents", "tokens", "trained_tokens")
        counts += [(f"{key} of datasets", peer[key], ours[key]) for key in keys]
    for what, count, expected in counts:
        if count != expected:
            raise RunFailed(f"not the same work: {what}: {count:,}, expected {expected:,}")


def _checks(rows: list[Row]) -> list[Row]:
    named = {row["name"]: row for row in reversed(rows)}
    ours, tokenizer_row, second = named["sojourn"], named["tokenizer"], named["second call"]
    peaks = [row["peak_memory"] for row in rows if row["name"] == "sojourn"]
    ratio = ours["tokens_per_second"] / tokenizer_row["tokens_per_second"]
    checks = [
        (
            "speed against the bare tokenizer", f"{ratio:.2f}x", f"at least {MIN_TOKENIZER_SHARE}x",
            ratio >= MIN_TOKENIZER_SHARE,
        ),
        (
            "peak memory", f"{max(peaks) / 2**20:,.0f} MiB", f"under {MAX_MEMORY / 2**20:,.0f} MiB",
            max(peaks) < MAX_MEMORY,
        ),
        (
            "second call", f"{second['seconds']:.2f} s", f"under {MAX_SECOND_CALL:.0f} s",
            second["seconds"] < MAX_SECOND_CALL,
        ),
    ]  # fmt: skip
    if "datasets" in named:
        ratio = named["datasets"]["seconds"] / ours["seconds"]
        checks.insert(0, ("speed against datasets.map", f"{ratio:.2f}x", f"at least {MIN_SPEED_UP:.0f}x",
                         ratio >= MIN_SPEED_UP))  # fmt: skip
    if len(peaks) > 1:
        growth = max(peaks) / min(peaks)
        checks.append(
            (
                "largest peak over smallest, by size",
                f"{growth:.2f}x",
                f"at most {MAX_MEMORY_GROWTH}x",
                growth <= MAX_MEMORY_GROWTH,
            )
        )
    return [dict(zip(("name", "value", "target", "pass"), check, strict=True)) for check in checks]


def _describe_environment(bench: PrepareBench) -> dict[str, Any]:
    from sojourn.machine.hardware import cpu

    machine = cpu()
    return {
        "command": shlex.join(["sojourn", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": machine.model, "cores": machine.usable, "system": platform.platform(), "workers": bench.workers,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
    }  # fmt: skip
