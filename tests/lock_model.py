"""A model of run/lock.py: several processes that start, own, hang, wake up, end and are killed, in every order.

Each step of the model is one atomic access to the shared folder. Claims are files named by their token. The steps of a
starter are those of `RunLock._acquire`, in `STEPS`; `test_protocol.py` compares them, and every decision about who is
alive, with the real functions. One assumption is about time: an owner that does not hang writes a heartbeat while
another machine watches it (`HEARTBEAT_TIMEOUT` is ten times `HEARTBEAT_INTERVAL`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

STEPS = ("flock", "list", "alive", "create", "confirm", "remove")  # then it owns the run
Flock = Literal["works", "on each machine", "missing"]


class Claim(NamedTuple):
    token: int
    owner: int  # index of the process; -1 for one that was killed before the model begins
    beat: int = 0
    released: bool = False


class Process(NamedTuple):
    """`at`: a step, or "watch", "own", "checked" (about to write), "gone". `seen`: the claim that it read."""

    machine: int
    at: str = STEPS[0]
    token: int = 0
    seen: Claim | None = None
    beats: int = 0
    hangs: bool = False
    has_hung: bool = False


class State(NamedTuple):
    processes: tuple[Process, ...]
    claims: frozenset[Claim]
    flock: frozenset[tuple[int, int]] = frozenset()  # the machine, or -1 for all, and the process that holds it

    def newest(self) -> Claim | None:
        return max(self.claims, default=None)

    def owns(self, number: int) -> bool:
        """Whether its `check` passes."""
        newest = self.newest()
        return newest is None or newest.token <= self.processes[number].token


def is_owner_alive(released: bool, same_boot: bool, running: bool) -> bool | None:
    """None: it must be watched. As `_is_owner_alive` decides, in one pid namespace."""
    if released:
        return False
    return running if same_boot else None


@dataclass
class LockModel:
    """`confirms`: as the code does; without, the model finds how a slow starter comes to own a run of others."""

    flock: Flock
    stale_machine: int = 0  # of the process that was killed before
    confirms: bool = True
    beats: int = 1  # at most, of each process
    transitions: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def explore(self, machines: tuple[int, ...], claims: frozenset[Claim]) -> int:
        """All states from a start of one process on each of `machines`; returns their number."""
        start = State(tuple(Process(machine) for machine in machines), claims)
        seen, frontier = {start}, [start]
        while frontier:
            state = frontier.pop()
            for new in self._successors(state):
                self.transitions += 1
                if new not in seen:
                    seen.add(new)
                    frontier.append(new)
        return len(seen)

    def _successors(self, state: State) -> Iterator[State]:
        for number, process in enumerate(state.processes):
            if process.at == "gone":
                continue
            yield self._gone(state, number)  # killed
            yield _with(state, number, process._replace(hangs=not process.hangs, has_hung=True))
            if not process.hangs:
                for new in self._steps(state, number, process):
                    self._check(state, new, number)
                    yield new

    def _steps(self, state: State, number: int, process: Process) -> Iterator[State]:
        yield from getattr(self, f"_{process.at}")(state, number, process)

    def _flock(self, state: State, number: int, process: Process) -> Iterator[State]:
        held = -1 if self.flock == "works" else process.machine
        if self.flock != "missing":
            if any(where == held for where, _ in state.flock):
                yield self._gone(state, number)
                return
            state = state._replace(flock=state.flock | {(held, number)})
        yield _with(state, number, process._replace(at="list"))

    def _list(self, state: State, number: int, process: Process) -> Iterator[State]:
        newest = state.newest()
        yield _with(state, number, process._replace(at="create" if newest is None else "alive", seen=newest))

    def _alive(self, state: State, number: int, process: Process) -> Iterator[State]:
        """The claim was read when it was listed; it may be gone, or have changed, since."""
        claim = process.seen
        assert claim is not None
        machine = self.stale_machine if claim.owner < 0 else state.processes[claim.owner].machine
        alive = is_owner_alive(claim.released, machine == process.machine, self._is_running(state, claim.owner))
        if alive is None:
            yield _with(state, number, process._replace(at="watch"))
        elif alive:
            yield self._gone(state, number)
        else:
            yield _with(state, number, process._replace(at="create"))

    def _watch(self, state: State, number: int, process: Process) -> Iterator[State]:
        claim = process.seen
        assert claim is not None
        if state.newest() != claim:
            yield self._gone(state, number)
        elif not self._is_running(state, claim.owner) or state.processes[claim.owner].hangs:
            self.counts["owners that hung, or had ended elsewhere, taken over"] += 1
            yield _with(state, number, process._replace(at="create"))

    def _create(self, state: State, number: int, process: Process) -> Iterator[State]:
        token = 1 + (process.seen.token if process.seen is not None else 0)
        if any(claim.token == token for claim in state.claims):
            yield self._gone(state, number)
            return
        state = state._replace(claims=state.claims | {Claim(token, number)})
        yield _with(
            state, number, process._replace(at="confirm" if self.confirms else "remove", token=token, seen=None)
        )

    def _confirm(self, state: State, number: int, process: Process) -> Iterator[State]:
        if not state.owns(number):
            self.counts["slow starters refused"] += 1
            yield self._gone(state, number)
            return
        yield _with(state, number, process._replace(at="remove"))

    def _remove(self, state: State, number: int, process: Process) -> Iterator[State]:
        kept = frozenset(claim for claim in state.claims if claim.token >= process.token)
        yield _with(state._replace(claims=kept), number, process._replace(at="own"))

    def _own(self, state: State, number: int, process: Process) -> Iterator[State]:
        if not state.owns(number):
            self.counts["losers stopped by their check"] += 1
            yield self._gone(state, number)
            return
        yield _with(state, number, process._replace(at="checked"))
        yield self._gone(_changed(state, process.token, released=True), number)
        if process.beats < self.beats:
            beating = _changed(state, process.token, beat=process.beats + 1)
            yield _with(beating, number, process._replace(beats=process.beats + 1))

    def _checked(self, state: State, number: int, process: Process) -> Iterator[State]:
        """It writes a checkpoint."""
        self.counts["writes"] += 1
        yield _with(state, number, process._replace(at="own"))

    def _gone(self, state: State, number: int) -> State:
        """Its flock is freed by the kernel."""
        free = frozenset(held for held in state.flock if held[1] != number)
        gone = Process(state.processes[number].machine, "gone")
        return _with(state._replace(flock=free), number, gone)

    def _is_running(self, state: State, number: int) -> bool:
        return number >= 0 and state.processes[number].at != "gone"

    def _check(self, before: State, after: State, number: int) -> None:
        """What must hold after a step of a process."""
        owners = [at for at, process in enumerate(after.processes) if process.at in ("own", "checked")]
        assert sum(after.owns(owner) for owner in owners) <= 1, f"two owners: {after}"
        was, now = before.processes[number], after.processes[number]
        if was.at == "remove" and now.at == "own" and not was.has_hung:
            assert after.owns(number), f"became the owner of a run that another one owns: {after}"
        if was.at in ("own", "checked") and not before.owns(number):
            assert was.has_hung, f"a process that never hung has lost the run: {after}"
        if was.at == "checked" and not before.owns(number):
            self.counts["writes of a hung process whose check came before the takeover"] += 1
        newest, oldest = after.newest(), before.newest()
        assert newest is not None or oldest is None, f"the newest claim was removed: {after}"
        assert newest is None or oldest is None or newest.token >= oldest.token, f"a token was used again: {after}"


def _with(state: State, number: int, process: Process) -> State:
    processes = state.processes
    return state._replace(processes=(*processes[:number], process, *processes[number + 1 :]))


def _changed(state: State, token: int, **changes: object) -> State:
    """With the claim of this token rewritten, if it is still there."""
    claims = frozenset(claim._replace(**changes) if claim.token == token else claim for claim in state.claims)
    return state._replace(claims=claims)
