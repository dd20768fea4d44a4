"""A tiny run of each method: its undisturbed result as a reference, and what must hold for one that is killed."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from kill.train_call import Outcome, TrainCall
from shared import make_base
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, read_json_lines, sha256

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="a trainer is forked, and its files seen in /proc")

EPOCHS, BATCH, EVERY, KEEP = 3, 3, 2, 2
_COLOURS = ("red", "green", "blue", "gold", "grey", "pink")
_COMMON = [
    "data.max_length=48", "data.eval_fraction=0.2", f"train.epochs={EPOCHS}", f"train.global_batch={BATCH}",
    "train.device=cpu", "train.precision=fp32", "train.lr=1e-2", "train.eval_every=5", "train.sample_tokens=2",
    "log.every_steps=1", "log.tensorboard=off", f"save.every_steps={EVERY}", f"save.keep={KEEP}",
]  # fmt: skip
_ADAPTER = ["method.rank=2", "method.dropout=0.1", "method.targets=[q_proj,v_proj]"]
METHODS = {
    "pretrain": ["smoke", "model.d_model=32", "data.vocab_size=300"],
    "lora": ["method.kind=lora", *_ADAPTER],
    "qlora": ["method.kind=qlora", *_ADAPTER],
}


@dataclass(frozen=True)
class Reference:
    """`calls`: the disk calls of an undisturbed run, in order; `seconds`: how long it took, `tail` of them after its
    last step."""

    method: str
    home: Path
    args: list[str]
    fork_server: ForkServer
    result: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    total: int = 0
    seconds: float = 0.0
    tail: float = 0.0


def make_reference(fork_server: ForkServer, home: Path, method: str) -> Reference:
    """Prepares the data, and runs once undisturbed."""
    home.mkdir()
    chats = home / "chats.jsonl"
    lines = [
        {"prompt": f"What colour is house {i}?", "completion": f"It is {_COLOURS[i % 6]}, and so is {i * 7}."}
        for i in range(24)
    ]
    chats.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    args = [*METHODS[method], f"data.sources={chats}", *_COMMON]
    if method != "pretrain":
        args.insert(0, f"model.base={make_base(chats, home, 'llama')}")
    bare = Reference(method, home, args, fork_server)
    for name, *shorter in (("first", "train.epochs=1"), ("whole",)):  # the first prepares data for all later ones
        killed = KilledRun(bare, name, *shorter)
        last = killed.call(log_calls=name == "whole")
        assert last.code == 0, last.stderr
    run = killed.run
    lines = [line for line in run.read_metrics() if line["kind"] == "train"]
    calls = [line["name"] for line in killed.log() if line["what"] == "call"]
    events = {line["kind"]: line["time"] for line in read_json_lines(run.events)}
    reference = Reference(
        method, home, args, fork_server, weights_of(run), [line["loss"] for line in lines], calls,
        run.status().total_steps, last.seconds, max(0.05, events["done"] - lines[-1]["time"]),
    )  # fmt: skip
    killed.reference = reference
    killed.check_end()
    return reference


def least_seconds(log: list[dict[str, Any]]) -> float:
    """What the ledger must know: from the first to the last line that each process logged, less a second."""
    lived: dict[int, list[float]] = {}
    for line in log:
        lived.setdefault(line["pid"], []).append(line["time"])
    return sum(max(0.0, times[-1] - times[0] - 1) for times in lived.values())


def weights_of(run: RunFolder) -> dict[str, str]:
    """SHA-256 of everything that a run leaves of its training."""
    final = [*run.final.glob("*.safetensors"), *run.best.glob("*.safetensors")]
    last = list_checkpoints(run.checkpoints)[-1]
    files = [*final, *last.glob("*.safetensors")]
    return {str(file.relative_to(run.path)): sha256(file) for file in files}


class KilledRun:
    """One run from its first call to `final/`, with what must hold after each call."""

    def __init__(self, reference: Reference, name: str, *args: str, folder: Path | None = None) -> None:
        self.reference, self.run = reference, RunFolder(folder or reference.home / "runs" / name)
        place = [] if folder is None else [f"save.folder={folder}"]
        self._args = [*reference.args, f"name={name}", *place, *args]
        self._log = reference.home / f"log-{name}"
        self._seconds = 0.0
        self.used = 0.0  # wall-clock seconds of all processes
        self.where: Counter[str] = Counter()

    def train_call(self, **faults_given: Any) -> TrainCall:
        home, run = str(self.reference.home), str(self.run.path)
        return TrainCall(self._args, home, run, str(self._log), **faults_given)

    def call(self, crowded: bool = False, **faults_given: Any) -> Outcome:
        """`sojourn train`, once; returns when it has ended, however that was. `crowded`: others use its disk."""
        before = self.newest_good()
        outcome = self.train_call(**faults_given).run_with(self.reference.fork_server)
        self.used += outcome.seconds
        self._check_call(outcome, before, full=crowded or "fill" in faults_given)
        if outcome.killed:
            self.where[self._killed_during(outcome.pid)] += 1
        return outcome

    def finish(self, curve: bool = True) -> Outcome:
        """Without further trouble, to the end."""
        outcome = self.call()
        assert outcome.code == 0, outcome.stderr
        self.check_end(curve)
        return outcome

    def clear(self) -> None:
        """Removes its files after a passed test."""
        shutil.rmtree(self.run.path, ignore_errors=True)
        self._log.unlink(missing_ok=True)

    def log(self, pid: int | None = None) -> list[dict[str, Any]]:
        return [line for line in read_json_lines(self._log) if pid in (None, line["pid"])]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_json_lines(self.run.events) if line["kind"] == kind]

    def newest_good(self) -> int:
        """The step from which a resumed run must start."""
        good = [step_of(path) for path in list_checkpoints(self.run.checkpoints) if find_damage(path) is None]
        return max(good, default=0)

    def leftovers(self) -> list[str]:
        """Names of temporary files that stayed."""
        names = [path.name for path in self.run.path.rglob(".*")]
        return [name for name in names if name != ".lock" and not name.startswith(".owner-")]

    def steps(self, pid: int) -> list[int]:
        return [line["step"] for line in self.log(pid) if line["what"] == "trained"]

    def _check_call(self, outcome: Outcome, before: int, full: bool) -> None:
        assert "Traceback" not in outcome.stderr, outcome.stderr
        assert "damaged" not in outcome.stdout, outcome.stdout
        steps, good = self.steps(outcome.pid), self.newest_good()
        assert steps == list(range(before, before + len(steps))), f"did not go on from step {before}"
        if before and steps:
            assert f"resuming from step {before} (step-{before:08d})" in outcome.stdout
        saved = [line["step"] for line in self.events("saved")]
        assert good >= max(saved, default=0), "what was reported as saved is not there"
        # One save may be under way when the next is due; the next then waits for it.
        lost = steps[-1] + 1 - good if steps else 0
        assert lost <= 2 * EVERY or "saving is tried again later" in outcome.stdout, f"{lost} steps: {outcome.stdout}"
        latest = self.run.checkpoints / "latest"
        # On a full disk it may be too late: only a reader that does not look for itself would be misled.
        assert full or not latest.exists() or find_damage(latest.parent / latest.read_text().strip()) is None
        seconds = (read_json(self.run.ledger) or {}).get("seconds", 0.0)
        assert seconds >= self._seconds, "the ledger forgot time"
        self._seconds = seconds
        status = self.run.status()
        if outcome.killed and status is not None:
            assert (status.state, status.resumable) in (("failed", True), ("stopped", True), ("done", False)), status

    def _killed_during(self, pid: int) -> str:
        """What a killed call was at, by what it left behind."""
        fault = next((line for line in self.log(pid) if line["what"] == "fault"), None)
        if fault is not None:
            return fault["name"].split()[0] + " " + fault["how"]
        for part, name in ((self.run.checkpoints, "a save"), (self.run.path, "writing a model")):
            if any(part.glob(f".stage-{pid}-*")):
                return name
        steps = self.steps(pid)
        if steps and steps[-1] + 1 == self.reference.total:
            return "the end"
        return "steps" if steps else "the start"

    def check_end(self, curve: bool = True) -> None:
        """Done, and equal to the undisturbed run. `curve`: no line of the metrics is missing."""
        run, reference = self.run, self.reference
        status = run.status()
        assert (status.state, status.step, status.resumable) == ("done", reference.total, False)
        mine = weights_of(run)
        differ = {name for name, digest in reference.result.items() if mine.get(name) != digest}
        if not curve:  # a disk so full that it could not take a line could not take `best/` either, and that was told
            differ = {name for name in differ if not name.startswith("best/")}
        assert not differ, differ
        losses = [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]
        assert losses == reference.losses if curve else set(losses) <= set(reference.losses)
        assert self.rows_are_exact()
        assert self.leftovers() == []
        kept = list_checkpoints(run.checkpoints)
        assert step_of(kept[-1]) == reference.total and [find_damage(path) for path in kept] == [None] * len(kept)
        assert (run.checkpoints / "latest").read_text().strip() == kept[-1].name
        assert self._seconds >= read_json(kept[-1] / "state.json")["seconds"]

    def ledger_is_exact(self) -> bool:
        """No more than the calls took, and, to a second of each, no less than they lived by their log."""
        least = least_seconds(self.log())
        seconds = read_json(self.run.ledger)["seconds"]
        assert least <= seconds <= self.used + 1, f"{seconds:.2f} s, not {least:.2f} to {self.used:.2f}"
        return True

    def rows_are_exact(self) -> bool:
        """By the log: a step reads the same rows and tokens each time; the steps that made the model are all of them
        once, in order; and in each epoch they hold every row once."""
        rows, made, of = self._made()
        assert made == list(range(self.reference.total))
        read = [row for step in made for row in rows[step]]
        epochs = [sorted(read[start : start + of]) for start in range(0, len(read), of)]
        assert epochs == [list(range(of))] * EPOCHS
        return True

    def made_in_order(self) -> bool:
        """By the log: no two processes trained the run at the same time."""
        trained = [line["pid"] for line in self.log() if line["what"] == "trained"]
        turns = [pid for index, pid in enumerate(trained) if index == 0 or trained[index - 1] != pid]
        assert len(turns) == len(set(turns)), "two processes trained in turns"
        return bool(self._made())

    def _made(self) -> tuple[dict[int, list[int]], list[int], int]:
        """The rows of each step, the steps that made the model, and the number of rows."""
        rows: dict[int, list[int]] = {}
        fed: dict[int, str] = {}
        made: list[int] = []
        of = 0
        pids = set()
        for line in self.log():
            step = line.get("step")
            if line["what"] == "read":
                assert rows.setdefault(step, line["rows"]) == line["rows"], f"step {step} read other rows"
                of = line["of"]
            elif line["what"] == "fed":
                assert fed.setdefault(step, line["digest"]) == line["digest"], f"step {step} read other tokens"
            elif line["what"] == "trained":
                if line["pid"] not in pids:  # a call goes back to its checkpoint, and what came after is made again
                    pids.add(line["pid"])
                    del made[step:]
                assert step == len(made), f"step {step} came after {len(made)}"
                made.append(step)
        return rows, made, of
