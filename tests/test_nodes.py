"""Two machines that share no disk train one run: two network namespaces, each with a name and an address of its own,
and in each the command that a user would type there. One of them is lost and comes back; the next time they change
roles."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conftest import clean_environment
from fork_server import Child, ForkServer
from sojourn.run.folder import RunFolder
from tiny import Tiny, events, losses, saved_steps

_PATIENCE = 240.0  # seconds for whatever a test waits for; a loaded machine may be slow, none may hang
_STEPS = 32
_RUN = (f"train.steps={_STEPS}", "save.every_steps=2")
_NUMBERS = itertools.count()

Process = subprocess.Popen[bytes] | Child

# As `ip netns exec NAME unshare --uts` and `hostname NAME`. A lost machine is given up after 3 s, not 15 s.
_ENTER = """
import ctypes, socket
libc = ctypes.CDLL(None)
with open("/run/netns/{name}") as namespace:
    assert libc.setns(namespace.fileno(), 0x40000000) == 0
assert libc.unshare(0x04000000) == 0
socket.sethostname("{name}")
from sojourn.launch import agent
args = agent._torchrun_args
sooner = lambda word: word + ",keep_alive_interval=1" if word.startswith("--rdzv-conf") else word
agent._torchrun_args = lambda *given: list(map(sooner, args(*given)))
"""


@dataclass
class Node:
    """A machine: its own network, name and disk."""

    name: str
    address: str
    home: Path
    started: list[Process] = field(default_factory=list)

    def said(self) -> str:
        """On the console."""
        return self._console.read_text(encoding="utf-8") if self._console.exists() else ""

    def logs(self) -> str:
        """All that was said here, by silent processes too."""
        files = [self._console, *sorted(self.home.glob("runs/*/logs/*.log"))]
        texts = [(path.name, path.read_text(encoding="utf-8")) for path in files if path.exists()]
        return "".join(f"\n--- {self.address}, {name}\n{text}" for name, text in texts)

    @property
    def _console(self) -> Path:
        return self.home / "console.log"

    def train(self, words: list[str], number: int, master: Node, fork_server: ForkServer | None = None) -> Process:
        """What a user types on machine `number` of two. With `fork_server`, processes are forked, not new Pythons."""
        where = ["--nnodes", "2", "--node_rank", str(number), "--master_addr", f"{master.address}:29500"]
        inside = [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
        ]
        command = [*inside, sys.executable, "-m", "sojourn", "train", *words, *where]
        env = {**clean_environment(), "SOJOURN_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        if fork_server is not None:
            forked = fork_server.start(
                "train", *words, *where, preamble=_ENTER.format(name=self.name), env=env, cwd=str(self.home),
                fork_children=True, output=str(self._console),
            )  # fmt: skip
            self.started.append(forked)
            return forked
        with self._console.open("ab") as log:
            made = subprocess.Popen(
                command, cwd=self.home, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.started.append(made)
        return made

    def lose(self) -> None:
        """Every process of it is killed; none has time for a last word."""
        end = time.monotonic() + _PATIENCE
        while pids := _ip("netns", "pids", self.name).split():
            assert time.monotonic() < end, f"{self.name}: processes that cannot be killed: {pids}"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for one in self.started:
                one.poll()
        for one in self.started:
            one.wait(_PATIENCE)

    def run(self, words: list[str]) -> RunFolder:
        return RunFolder(self.home / "runs" / next(word[5:] for word in words if word.startswith("name=")))


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout


@contextmanager
def _machines(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two of them and a cable. Neither can resolve a name, not even its own, as happens with rented ones."""
    unique = f"sojourn-{os.getpid()}-{next(_NUMBERS)}"
    one, two = (Node(f"{unique}-{k}", f"10.213.77.{k}", folder / f"disk{k}") for k in (1, 2))
    try:
        for node in (one, two):
            node.home.mkdir()
            _ip("netns", "add", node.name)
        _ip("link", "add", "eth0", "netns", one.name, "type", "veth", "peer", "name", "eth0", "netns", two.name)
        for node in (one, two):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", node.name, "link", "set", link, "up")
        yield one, two
    finally:
        for node in (one, two):
            with suppress(subprocess.SubprocessError):  # the namespace may never have come to be
                node.lose()
            with suppress(subprocess.SubprocessError):
                _ip("netns", "delete", node.name)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("network namespaces are made by root on Linux only")
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)")
    network = _machines(tmp_path)
    try:
        made = network.__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        network.__exit__(None, None, None)


def _until(ready: Callable[[], bool], what: str, nodes: tuple[Node, Node], *alive: Process) -> None:
    """`alive`: those that must not end before."""
    end = time.monotonic() + _PATIENCE
    while not ready():
        trouble = f"{what}: not within {_PATIENCE:g} s" if time.monotonic() > end else None
        if any(one.poll() is not None for one in alive):
            trouble = f"{what}: a machine ended before"
        assert trouble is None, trouble + "".join(node.logs() for node in nodes)
        time.sleep(0.01)


def _until_done(nodes: tuple[Node, Node], *running: Process) -> None:
    _until(lambda: all(one.poll() is not None for one in running), "the end of the run", nodes)
    assert [one.returncode for one in running] == [0] * len(running), "".join(node.logs() for node in nodes)


def _check(words: list[str], tiny: Tiny, writer: Node, other: Node) -> None:
    """The run is what one process alone would have made of it; one machine has it all."""
    run, alone = writer.run(words), losses(tiny.whole(*_RUN))
    logs = writer.logs() + other.logs()
    assert losses(run) == pytest.approx(alone, rel=1e-5) and len(alone) == _STEPS, logs
    assert run.status().state == "done" and run.has_final() and not other.run(words).final.exists(), logs
    assert [node.logs().count("reading and tokenizing") for node in (writer, other)] == [1, 1], logs


@pytest.mark.slow
def test_two_machines_train_what_one_would(tiny, nodes):
    words, (one, two) = tiny.words(*_RUN), nodes
    _until_done(nodes, two.train(words, 1, one), one.train(words, 0, one))
    _check(words, tiny, one, two)
    assert [(event["step"], event["processes"]) for event in events(one.run(words), "start")] == [(0, 2)]


def test_a_machine_that_was_lost_comes_back_and_the_run_goes_on(tiny, nodes, fork_server):
    words, (one, two) = tiny.words(*_RUN), nodes
    first, second = one.train(words, 0, one, fork_server), two.train(words, 1, one, fork_server)
    run = one.run(words)
    _until(lambda: bool(saved_steps(run)), "a checkpoint", nodes, first, second)
    two.lose()
    _until_done(nodes, first, two.train(words, 1, one, fork_server))
    _check(words, tiny, one, two)
    begun, continued = events(run, "start")
    assert begun["step"] == 0 and 2 <= continued["step"] < _STEPS
    assert f"resuming from step {continued['step']}" in one.said()
    assert f"the checkpoint of step {continued['step']} was copied from another node" in two.logs()


@pytest.mark.slow
def test_the_machine_that_wrote_is_lost_and_the_other_one_writes_on(tiny, nodes):
    words, (one, two) = tiny.words(*_RUN), nodes
    first, second = one.train(words, 0, one), two.train(words, 1, one)
    _until(lambda: bool(saved_steps(one.run(words))), "a checkpoint", nodes, first, second)
    one.lose()
    _until(lambda: second.poll() is not None, "the end of a machine that cannot meet the first one", nodes)
    assert second.returncode == 1 and "timed out waiting for the nodes of this run at" in two.said().splitlines()[-1], (
        two.logs()
    )
    assert "Traceback" not in two.said() and "frame #" not in two.said(), two.logs()
    assert not two.run(words).checkpoints.exists()

    newest = max(saved_steps(one.run(words)))
    _until_done(nodes, one.train(words, 1, two), two.train(words, 0, two))
    _check(words, tiny, two, one)
    assert [event["step"] for event in events(two.run(words), "start")] == [0, newest]
    assert f"the checkpoint of step {newest} was copied from another node" in two.said()


@pytest.mark.slow
def test_what_one_machine_refuses_ends_the_run_on_both_in_a_line(tiny: Tiny, nodes: tuple[Node, Node]) -> None:
    """The data is on the first machine only."""
    one, two = nodes
    words = ["data.sources=chats.jsonl" if w.startswith("data.sources") else w for w in tiny.words(*_RUN)]
    shutil.copy(tiny.chats, one.home / "chats.jsonl")
    both = one.train(words, 0, one), two.train(words, 1, one)
    _until(lambda: all(process.poll() is not None for process in both), "the end on both", nodes)
    assert [process.returncode for process in both] == [2, 2]
    for node in nodes:
        assert "chats.jsonl: no such file" in node.said() and "Traceback" not in node.said()
