"""Measures preparation: against the same work done with `datasets`, against the bare tokenizer, and by its memory.

Each contender runs in a fresh process on the same generated chats, with the same tokenizer and as many processes.
`sojourn` prepares; `tokenizer` is the floor, `encode_batch_fast` alone on the rendered texts; `datasets` is the peer:
load, render, tokenise, mask and pack with `datasets.map`, as trl does it.
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

from sojourn.bench.contenders import ROW_LENGTH, chats_of, words_of
from sojourn.bench.memory import watched
from sojourn.config.quantities import Size
from sojourn.errors import RunFailed, UserError
from sojourn.train.metrics.environment import version_of

Say = Callable[[str], None]
Row = dict[str, Any]

_SMALLEST = 500_000
_ROOM = 4  # the corpus, the artefact, the peer's two sets of Arrow files
_TRAINED_ON, _VOCABULARY = 8_000_000, 32_000
_SECOND_CALLS = 3
_PACKAGES = ("sojourn", "tokenizers", "datasets", "transformers", "numpy", "pyarrow")

AGAINST_PEER, AGAINST_FLOOR, MOST_MEMORY, SECOND_CALL, FLAT = 2.0, 0.8, 2**30, 1.0, 1.25


@dataclass(frozen=True)
class Plan:
    """What to measure. `flat` are further sizes at which only our own memory is measured."""

    size: int
    flat: tuple[int, ...]
    tokenizer: Path | None
    workers: int
    peer: bool
    folder: Path


def make_plan(size: str, flat: str, tokenizer: Path | None, workers: int | None, peer: bool, folder: Path) -> Plan:
    from sojourn.machine.hardware import cpu

    sizes = tuple(_size("--flat", word) for word in flat.split(",") if word.strip())
    plan = Plan(_size("--size", size), sizes, tokenizer, workers or max(1, int(cpu().usable)), peer, folder)
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise UserError(f"--tokenizer: {tokenizer}: no folder with a tokenizer.json")
    if not folder.is_dir():
        raise UserError(f"--folder: {folder}: no such folder")
    missing = [name for name in ("datasets", "transformers") if find_spec(name) is None]
    if peer and missing:
        raise UserError(f"to compare with, {' and '.join(missing)} must be installed; or leave it out with --no-peer")
    needed, free = _ROOM * max(plan.size, *sizes, 0), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"--folder: {folder}: {free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed (four times the "
            "largest size); choose another, or smaller sizes"
        )
    return plan


def _size(flag: str, word: str) -> int:
    try:
        size = int(Size.parse(word))
    except ValueError as error:
        raise UserError(f"{flag}: “{word}” given; {error}") from None
    if size < _SMALLEST:
        raise UserError(f"{flag}: “{word}” given; the least that can be measured is 500kB")
    return size


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Everything, and a line to `say` for each row as it comes. Nothing is left in the folder, however it ends."""
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-", dir=plan.folder) as made:
        work, rows = Path(made), list[Row]()
        say(f"{'':<22}{'documents':>12}{'tokens':>15}{'seconds':>10}{'tokens/s':>12}{'peak MiB':>10}")
        corpus, chats = _corpus(work, plan.size)
        tokenizer = _tokenizer(plan, corpus, work)

        def add(role: str, corpus: Path) -> Row:
            row = _row(role, corpus, tokenizer, plan.workers, work)
            rows.append(row)
            say(line(row))
            return row

        ours = add("sojourn", corpus)
        floor = add("tokenizer", corpus)
        peer = add("datasets", corpus) if plan.peer else None
        _check(chats, ours, floor, peer)
        rows.append(_second_call(ours, corpus, tokenizer, plan.workers, work))
        say(line(rows[-1]))
        for size in plan.flat:
            corpus.unlink()
            shutil.rmtree(work / "home")
            corpus, chats = _corpus(work, size)
            _check(chats, add("sojourn", corpus), None, None)
    verdicts = _verdicts(rows)
    for verdict in verdicts:
        say(f"{verdict['what']}: {verdict['figure']} ({verdict['bar']}): {'pass' if verdict['pass'] else 'fail'}")
    return {**_circumstances(plan), "rows": rows, "verdicts": verdicts}


def line(row: Row) -> str:
    name = row["name"] if row["name"] == "second call" else f"{row['name']}, {row['bytes'] / 1e6:,.0f} MB"
    memory = f"{row['peak_memory'] / 2**20:,.0f}" if "peak_memory" in row else ""
    tokens = [f"{row[key]:,}" if key in row else "" for key in ("documents", "tokens")]
    rate = f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else ""
    return f"{name:<22}{tokens[0]:>12}{tokens[1]:>15}{row['seconds']:>10.2f}{rate:>12}{memory:>10}"


def _corpus(work: Path, size: int) -> tuple[Path, int]:
    from sojourn.bench.corpus import write_corpus
    from sojourn.storage.disk import sync_file

    path = work / "chats.jsonl"
    chats = write_corpus(path, size)
    sync_file(path)  # so that no contender shares the disk with its writing
    facts = path.stat()
    # A file that changed a moment ago may change again unseen, so its hash is not kept; a user's file is older.
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns - 10**10))
    return path, chats


def _tokenizer(plan: Plan, corpus: Path, work: Path) -> Path:
    """The folder of the tokenizer that all use, with its template in the form that transformers opens."""
    from sojourn.config.data import DataConfig
    from sojourn.data.tokenize.tokenizer import open_tokenizer, train_tokenizer

    folder = work / "tokenizer"
    if plan.tokenizer is not None:
        words = open_tokenizer(plan.tokenizer)
        words.save(folder, words.template("auto"), ROW_LENGTH)
        return folder
    data = DataConfig.model_validate({"tokenizer": "bpe", "vocab_size": _VOCABULARY})
    texts = (message.content for chat in chats_of(corpus, _TRAINED_ON) for message in chat)
    words = train_tokenizer(data, texts, folder)
    words.save(folder, words.template("chatml"), ROW_LENGTH)
    return folder


def _row(role: str, corpus: Path, tokenizer: Path, workers: int, work: Path) -> Row:
    """A contender in a process of its own."""
    task, out, log = work / "task.json", work / "row.json", work / "log.txt"
    facts = {
        "corpus": str(corpus), "tokenizer": str(tokenizer), "workers": workers, "home": str(work / "home"),
        "cache": str(work / "cache"), "out": str(out),
    }  # fmt: skip
    task.write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, "-c", "from sojourn.bench.contenders import contend; contend()", role, str(task)]
    try:
        code, memory = watched(command, _environment(work, workers, role), log)
        if code:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunFailed(f"{role} ended with exit code {code}: {said[-1] if said else 'nothing was said'}")
        row = json.loads(out.read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(work / "cache", ignore_errors=True)
    return {
        "name": role, "bytes": corpus.stat().st_size, **row, "seconds": round(row["seconds"], 3),
        "tokens_per_second": round(row["tokens"] / row["seconds"]), "peak_memory": memory.pss, "peak_rss": memory.rss,
        "memory_is": memory.kind, "memory_samples": memory.samples,
    }  # fmt: skip


def _environment(work: Path, workers: int, role: str = "") -> dict[str, str]:
    told = {
        "PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": str(workers), "SOJOURN_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"),
    }  # fmt: skip
    if role == "datasets" and workers > 1:  # its processes are the parallelism; threads in each would be in the way
        told["TOKENIZERS_PARALLELISM"] = "false"
    return {**os.environ, **told}


def _second_call(ours: Row, corpus: Path, tokenizer: Path, workers: int, work: Path) -> Row:
    """The whole command, Python's start included; the slowest of a few calls."""
    command = [sys.executable, "-m", "sojourn", "prepare", *words_of(str(corpus), str(tokenizer), workers), "--json"]
    seconds = 0.0
    for _ in range(_SECOND_CALLS):
        began = time.perf_counter()
        said = subprocess.run(command, env=_environment(work, workers), capture_output=True, text=True, check=False)
        seconds = max(seconds, time.perf_counter() - began)
        if said.returncode:
            raise RunFailed(f"the second call ended with exit code {said.returncode}: {said.stderr.strip()[-300:]}")
        if (found := json.loads(said.stdout)["path"]) != ours["path"]:
            raise RunFailed(f"the second call prepared {found} instead of finding {ours['path']}")
    return {"name": "second call", "bytes": ours["bytes"], "seconds": round(seconds, 3), "calls": _SECOND_CALLS}


def _check(chats: int, ours: Row, floor: Row | None, peer: Row | None) -> None:
    """All contenders must have done the same work, to the last token."""
    found = [("documents read by sojourn", ours["records"], chats)]
    if floor and floor["bytes"] == ours["bytes"]:  # else it read a part
        found.append(("documents read by the tokenizer", floor["documents"], chats))
        if not ours["cut"]:
            found.append(("tokens of the tokenizer", floor["tokens"], ours["tokens"]))
    if peer:
        keys = ("records", "documents", "tokens", "trained_tokens")
        found += [(f"{key} of datasets", peer[key], ours[key]) for key in keys]
    for what, there, expected in found:
        if there != expected:
            raise RunFailed(f"not the same work: {what}: {there:,}, expected {expected:,}")


def _verdicts(rows: list[Row]) -> list[Row]:
    named = {row["name"]: row for row in reversed(rows)}
    ours, floor, second = named["sojourn"], named["tokenizer"], named["second call"]
    peaks = [row["peak_memory"] for row in rows if row["name"] == "sojourn"]
    ratio = ours["tokens_per_second"] / floor["tokens_per_second"]
    found = [
        ("speed against the bare tokenizer", f"{ratio:.2f}x", f"at least {AGAINST_FLOOR}x", ratio >= AGAINST_FLOOR),
        (
            "peak memory", f"{max(peaks) / 2**20:,.0f} MiB", f"under {MOST_MEMORY / 2**20:,.0f} MiB",
            max(peaks) < MOST_MEMORY,
        ),
        (
            "second call", f"{second['seconds']:.2f} s", f"under {SECOND_CALL:.0f} s",
            second["seconds"] < SECOND_CALL,
        ),
    ]  # fmt: skip
    if "datasets" in named:
        ratio = named["datasets"]["seconds"] / ours["seconds"]
        found.insert(0, ("speed against datasets.map", f"{ratio:.2f}x", f"at least {AGAINST_PEER:.0f}x",
                         ratio >= AGAINST_PEER))  # fmt: skip
    if len(peaks) > 1:
        growth = max(peaks) / min(peaks)
        found.append(("largest peak over smallest, by size", f"{growth:.2f}x", f"at most {FLAT}x", growth <= FLAT))
    return [dict(zip(("what", "figure", "bar", "pass"), one, strict=True)) for one in found]


def _circumstances(plan: Plan) -> dict[str, Any]:
    from sojourn.machine.hardware import cpu

    machine = cpu()
    return {
        "command": shlex.join(["sojourn", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": machine.model, "cores": machine.usable, "system": platform.platform(), "workers": plan.workers,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
    }  # fmt: skip
