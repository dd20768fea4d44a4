"""The two places of a run's checkpoints, run folder and mirror, in every condition; what must come of it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from kill.killed_run import Reference, weights_of
from kill.train_call import Outcome, TrainCall
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json

NAME, NEWEST, EVERY = "aimed", 8, 2
HERE = ("good", "damaged", "foreign", "absent", "older", "newer")
THERE = (*HERE, "of another run")
_STEPS = {"older": (4, 6), "newer": (8, 10), "absent": ()}
_RUN_FILES = ("run.yaml", "identity.json", "environment.json", "mirror.json", "ledger.json")


@dataclass(frozen=True)
class Result:
    """`first`: the step from which the first call went on; None where it refused."""

    killed: bool
    first: int | None
    refusal: str = ""


class Copies:
    """Two finished runs of one name, with all their checkpoints in both places, from which the conditions are made."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._mirror = reference.home / "mirror"
        self.run = RunFolder(reference.home / "runs" / NAME)
        self._nothing_left = False
        self._kept = {seed: self._make(seed) for seed in ("0", "7")}

    def _make(self, seed: str) -> Path:
        """Trains to the end and moves both places away."""
        outcome = self._call(f"train.seed={seed}", "save.keep=99")
        assert outcome.code == 0, outcome.stderr
        kept = self._reference.home / f"kept-{seed}"
        shutil.move(self.run.path, kept / "run")
        shutil.move(self._mirror, kept / "mirror")
        return kept

    def _call(self, *args: str, **faults: dict[str, str]) -> Outcome:
        self._mirror.mkdir(exist_ok=True)
        home, log = self._reference.home, self._reference.home / "log-aimed"
        args = (*self._reference.args, f"name={NAME}", f"save.mirror={self._mirror}", *args)
        return TrainCall(list(args), str(home), str(self.run.path), str(log), **faults).run_with(
            self._reference.fork_server
        )

    def put(self, here: str, there: str) -> None:
        """Both places in these conditions."""
        self._nothing_left = here == there == "absent"
        shutil.rmtree(self.run.path, ignore_errors=True)
        shutil.rmtree(self._mirror, ignore_errors=True)
        ours, theirs = (self._kept[seed] for seed in ("0", "7"))
        if here != "absent":
            self.run.checkpoints.mkdir(parents=True)
            for name in _RUN_FILES:
                shutil.copy2(ours / "run" / name, self.run.path)
            self._fill(self.run.checkpoints, here, ours / "run", theirs / "run")
        if there != "absent":
            kept = theirs if there == "of another run" else ours
            mirror = self._mirror / NAME
            shutil.copytree(
                kept / "mirror" / NAME, mirror, ignore=shutil.ignore_patterns("checkpoints", "final", "best")
            )
            (mirror / "checkpoints").mkdir()
            self._fill(mirror / "checkpoints", there, kept / "mirror" / NAME, theirs / "mirror" / NAME)

    def _fill(self, folder: Path, condition: str, ours: Path, theirs: Path) -> None:
        for step in _STEPS.get(condition, (NEWEST - EVERY, NEWEST)):
            source = theirs if condition == "foreign" and step == NEWEST else ours
            shutil.copytree(source / "checkpoints" / _name(step), folder / _name(step))
        if condition == "damaged":
            file = folder / _name(NEWEST) / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    def newest_good(self) -> int:
        """Of this run, in both places, as the files are."""
        born_again = self._nothing_left and self.run.identity.is_file()
        identity = self.run.identity if born_again else self._kept["0"] / "run" / "identity.json"
        ours, newest = read_json(identity)["run_id"], 0
        for folder in (self.run.checkpoints, self._mirror / NAME / "checkpoints"):
            for path in list_checkpoints(folder):
                if find_damage(path) is None and read_json(path / "state.json")["run_id"] == ours:
                    newest = max(newest, step_of(path))
        return newest

    def survive(self, expected: int, kill: str) -> Result:
        """A call that is killed `kill` its first save is in place, and one to the end. `expected`: the newest good."""
        spent = self._seconds()
        saving = _name(expected + EVERY)
        name = f"rename checkpoints/.stage-PID-{saving} 1 of {saving}"
        outcomes = [self._call("save.keep=2", faults={name: kill})]
        if outcomes[0].killed:
            assert self.newest_good() >= expected + (EVERY if kill == "after" else 0)
            outcomes.append(self._call("save.keep=2"))
        for outcome in outcomes:
            assert "Traceback" not in outcome.stderr, outcome.stderr
        last = outcomes[-1]
        if last.code != 0:
            assert last.code in (1, 2) and re.fullmatch(r"sojourn: [^\n]+\n", last.stderr), (last.code, last.stderr)
            assert self.newest_good() == expected, "refused, and lost"
            return Result(False, None, last.stderr.strip())
        took = sum(outcome.seconds for outcome in outcomes)
        assert abs(self._seconds() - spent - took) <= len(outcomes), f"{self._seconds() - spent} booked of {took} s"
        self._check_end()
        said = re.search(r"resuming from step (\d+)", outcomes[0].stdout)
        return Result(outcomes[0].killed, int(said[1]) if said else 0)

    def _seconds(self) -> float:
        for path in (self.run.ledger, self._mirror / NAME / "ledger.json"):
            if path.is_file():
                return float(read_json(path)["seconds"])
        return 0.0

    def _check_end(self) -> None:
        mine = weights_of(self.run)
        wanted = {name: digest for name, digest in self._reference.result.items() if not name.startswith("best/")}
        assert wanted and {name: mine.get(name) for name in wanted} == wanted
        status = self.run.status()
        assert (status.state, status.step) == ("done", self._reference.total)
        there = self._mirror / NAME
        assert (there / "final" / ".mirror.json").is_file(), "final/ did not reach the mirror"
        for folder in (self.run.checkpoints, there / "checkpoints"):
            newest = list_checkpoints(folder)[-1]
            assert step_of(newest) == self._reference.total and find_damage(newest) is None


def _name(step: int) -> str:
    return f"step-{step:08d}"
