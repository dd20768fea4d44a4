"""Explores every state that the protocol of checkpoints and mirror can reach within a number of actions.

The code is the real one: a new process (recovery), saves, mirroring, retention. A state is the content of the folders
and what the process remembers. While an action runs, the folders are recorded before every disk call and in the middle
of every write: each record is the state that a kill at that moment leaves. With `power_cuts`, also the state in which
the files that were not synced yet are empty. What must hold is checked after every action and every kill, by code that
shares nothing with the code under test.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sojourn.config.load import load_run, to_yaml
from sojourn.errors import UserError
from sojourn.run import mirror_claim
from sojourn.run.folder import RunFolder
from sojourn.run.identity import Identity, read_identity
from sojourn.run.mirror_claim import MirrorClaim
from sojourn.storage import disk
from sojourn.storage.files import remove_temporary_files, write_text
from sojourn.storage.mirror import MirrorFailed
from sojourn.storage.path_mirror import PathMirror
from sojourn.train.checkpoint import checkpoint as checkpoint_module
from sojourn.train.checkpoint import recovery
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, read_verified, save
from sojourn.train.checkpoint.mirroring import Mirroring
from sojourn.train.checkpoint.recovery import establish_identity, find_newest_anywhere, join_mirror

RUN, MOUNTED, AWAY, BELOW = "run", "drive", "drive-away", "below-the-mount-point"
_HERE, _THERE = f"{RUN}/checkpoints/", "/run/checkpoints/"
_OWNER = f"{MOUNTED}/run/owner.json"
_DEAD_PID = "4194305"  # above the largest pid of Linux
_PID = re.compile(rf"(?<=\.stage-){os.getpid()}(?=-)|(?<=\.stage-mirror-){os.getpid()}(?=-)|(?<=\.){os.getpid()}$")
_LISTED = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")

Files = dict[str, bytes]  # of all folders, by path; a path that ends with a slash is a folder


@dataclass(frozen=True)
class Memory:
    """What a process that trains remembers: the steps that it has verified, the checkpoints that it has mirrored,
    whether the mirror is its own, and the last step that it has saved."""

    verified: frozenset[int] = frozenset()
    mirrored: frozenset[str] = frozenset()
    claimed: bool = False
    saved: int = 0
    step: int = 0


@dataclass(frozen=True)
class Node:
    """A state. `memory`: None where no process trains. `births`: how many ids were given to runs so far."""

    files: Files
    memory: Memory | None = None
    births: int = 0
    kills: int = 0  # in the midst of actions
    path: tuple[str, ...] = ()  # the actions that led here

    @property
    def key(self) -> bytes:
        facts = self.memory and _sorted(self.memory), self.births, self.kills
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
        for name in sorted(self.files):
            digest.update(f"{name}\0{len(self.files[name])}\0".encode() + self.files[name])
        return digest.digest()


def _sorted(memory: Memory) -> tuple[Any, ...]:
    return sorted(memory.verified), sorted(memory.mirrored), memory.claimed, memory.saved, memory.step


@dataclass
class Explorer:
    """`folder`: empty, best in memory. `steps`: at most so many are saved; `kills`: at most so many in the midst of
    actions; there may be any number between them."""

    folder: Path
    keep: Retention
    steps: int = 4
    kills: int = 9
    power_cuts: bool = False
    transitions: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)  # of restarts

    def __post_init__(self) -> None:
        self._config = load_run(["smoke", "name=run"]).config
        self._yaml = to_yaml(self._config)
        self._known: Files = {}  # what is in the folders now
        self._contents: dict[bytes, bytes] = {}  # one object for equal contents
        self._unsynced: set[int] = set()
        self._kills: list[Files] | None = None
        self._births = 0

    def explore(self, depth: int, *first: str) -> int:
        """Every state within `depth` actions after the undisturbed actions `first`; returns their number."""
        start = Node({f"{name}/": b"" for name in (RUN, MOUNTED, BELOW)})
        with self._disk_calls_recorded(), self._names_fixed():
            for name in first:
                start = next(node for node in self._successors(start) if node.path[-1] == name)
            seen, frontier = {start.key}, [start]
            for _ in range(depth):
                found = []
                for node in frontier:
                    for new in self._successors(node):
                        self.transitions += 1
                        if (key := new.key) not in seen:
                            seen.add(key)
                            found.append(new)
                frontier = found
        return len(seen)

    def _successors(self, node: Node) -> Iterator[Node]:
        if node.memory is None:
            yield from self._run(node, "restart", self._restart)
            if any(name.startswith(_HERE) for name in node.files):
                lost = {name: data for name, data in node.files.items() if not name.startswith(f"{RUN}/")}
                yield self._outside(node, "lose the run folder", lost | {f"{RUN}/": b""})
        else:
            if node.memory.step < self.steps:
                yield from self._run(node, "save", self._save)
            if node.memory.saved:
                yield from self._run(node, "mirror", self._mirror)
            yield replace(self._outside(node, "kill", node.files), memory=None)
        for place in (RUN, MOUNTED):
            if good := [copy for copy in good_copies(node.files) if copy.place == place]:
                newest = max(good, key=lambda copy: copy.step)
                file = f"{newest.path}/model.safetensors"
                files = node.files | {file: node.files[file][:-1] + b"\xff"}  # of the same size
                yield self._outside(node, f"damage the newest good copy in {place}", files)
        yield from self._of_the_drive(node)

    def _of_the_drive(self, node: Node) -> Iterator[Node]:
        """It is unmounted, so that the folder below it is seen; or it fails, and cannot be written."""
        if MOUNTED in node.files:
            files = {name: data for name, data in node.files.items() if name != MOUNTED}
            yield self._outside(node, "the drive works again", _moved(files, {AWAY: MOUNTED}))
        elif f"{AWAY}/" in node.files:
            yield self._outside(node, "the drive is mounted", _moved(node.files, {MOUNTED: BELOW, AWAY: MOUNTED}))
        else:
            yield self._outside(node, "the drive is unmounted", _moved(node.files, {MOUNTED: AWAY, BELOW: MOUNTED}))
            # A file in the place of the folder: every write below it fails.
            yield self._outside(node, "the drive fails", _moved(node.files, {MOUNTED: AWAY}) | {MOUNTED: b""})

    def _outside(self, node: Node, name: str, files: Files) -> Node:
        """An action that is not the program's."""
        self.actions[name] += 1
        return replace(node, files=files, path=(*node.path, name))

    # The program's actions.

    def _run(self, node: Node, name: str, act: Callable[[Node], Memory | None]) -> Iterator[Node]:
        """The state after the action, and those that a kill during it leaves."""
        self._put(node.files)
        self._births, self._kills = node.births, [] if node.kills < self.kills else None
        self._unsynced.clear()
        _remember(self._run_folder, node.memory)
        memory = act(node)
        kills, self._kills = self._kills or [], None
        self.actions[name] += 1
        after = replace(node, files=self._read(), memory=memory, births=self._births, path=(*node.path, name))
        self._known = after.files
        self._check(node, after)
        yield after
        for number, files in enumerate(kills):
            path = (*node.path, f"{name}, killed at {number}")
            killed = replace(after, files=files, memory=None, kills=node.kills + 1, path=path)
            self.actions[f"{name}, killed"] += 1
            self._check(node, killed)
            yield killed

    @property
    def _run_folder(self) -> RunFolder:
        return RunFolder(self.folder / RUN, is_main_process=False)  # so that it logs no events

    @property
    def _path_mirror(self) -> PathMirror:
        return PathMirror(self.folder / MOUNTED / "run")

    def _restart(self, node: Node) -> Memory | None:
        """What `train` does before its first step; None where it refuses."""
        run, mirror = self._run_folder, self._path_mirror
        try:
            remove_temporary_files(run.path)
            join_mirror(mirror, run, _silent)
            establish_identity(self._config, run, "data", is_known=True)
            write_text(run.config, self._yaml)
            newest = find_newest_anywhere(run, mirror, _silent)
        except UserError as error:
            self._check_refusal(node, str(error))
            return None
        step = 0
        if newest is not None:
            found = read_verified(newest)
            step = found.step
            assert found.model["w"].tolist() == [step, step], "not the weights of that step"
            assert found.state["run_id"] == read_identity(run.identity).run_id, "another run's checkpoint"
        self._check_resumed(node, step)
        mirroring = Mirroring(mirror, run, _silent)  # type: ignore[arg-type]
        if run.checkpoints.is_dir():
            checkpoint_module.recover(run.checkpoints, self.keep)
        return self._memory(mirroring, 0, step)

    def _save(self, node: Node) -> Memory:
        run, step = self._run_folder, node.memory.step + 1
        mark = read_identity(run.identity).mark
        tensors = {"w": torch.tensor([step, step])}
        state = {"step": step, "seconds": float(step), "money": 0.0, **mark}
        save(run.checkpoints, Checkpoint(tensors, tensors, tensors, state), self.keep)
        return self._memory(self._mirroring(node.memory), step, step)

    def _mirror(self, node: Node) -> Memory:
        mirroring = self._mirroring(node.memory)
        mirroring._copy(self._run_folder.checkpoints / f"step-{node.memory.saved:08d}", self.keep)
        self._check_mirrored(node, mirroring.failed)
        return self._memory(mirroring, node.memory.saved, node.memory.step)

    def _mirroring(self, memory: Memory) -> Mirroring:
        """As it was: only a new process claims the mirror at its start."""
        run, mirror = self._run_folder, self._path_mirror
        mirroring = Mirroring(_Absent(mirror.root), run, _silent)  # type: ignore[arg-type]
        mirroring._mirror, mirroring._claim = mirror, MirrorClaim(mirror, run)  # type: ignore[assignment]
        mirroring._claim._taken, mirroring._copied = memory.claimed, set(memory.mirrored)
        return mirroring

    def _memory(self, mirroring: Mirroring, saved: int, step: int) -> Memory:
        paths = checkpoint_module.list_checkpoints(self._run_folder.checkpoints)
        verified = frozenset(int(path.name[5:]) for path in paths if checkpoint_module._is_verified(path))
        return Memory(verified, frozenset(mirroring._copied), mirroring._claim._taken, saved, step)

    # What must hold.

    def _check(self, before: Node, after: Node) -> None:
        """After each action of the program, and each kill during one."""
        for place in (RUN, MOUNTED, AWAY, BELOW):
            had, has = (newest_good(node.files, (place,)) for node in (before, after))
            assert all(has.get(run_id, 0) >= step for run_id, step in had.items()), self._told(
                after, f"lost in {place}"
            )
        for place in (AWAY, BELOW):
            changed = _below(before.files, place) != _below(after.files, place)
            assert not changed, self._told(after, f"{place} was touched")
        theirs = _identity_in(before.files, f"{MOUNTED}/run/identity.json")
        now = _identity_in(after.files, f"{MOUNTED}/run/identity.json")
        assert theirs in (None, now), self._told(after, "the mirror of another run was taken")
        strange = [name for name in after.files if name.partition("/")[0] not in (RUN, MOUNTED, AWAY, BELOW)]
        assert not strange, self._told(after, f"{strange} were written")
        if before.memory is not None and before.memory.claimed and _OWNER not in before.files:
            changed = _below(before.files, MOUNTED) != _below(after.files, MOUNTED)
            assert not changed, self._told(after, "mirrored to something that is not the mirror")
        if after.memory is not None:
            here = newest_good(after.files, (RUN,)).values()
            is_saved = after.memory.saved in (0, before.memory and before.memory.saved, *here)
            assert is_saved, self._told(after, "what was saved is not there")
            latest = after.files.get(f"{RUN}/checkpoints/latest")
            named = None if latest is None else f"{RUN}/checkpoints/{latest.decode().strip()}/manifest.json"
            assert named is None or named in after.files, self._told(after, "latest names an absent checkpoint")

    def _check_resumed(self, node: Node, step: int) -> None:
        """`step`: where a new process goes on; 0 for the start."""
        ours = self._id_of(node.files)
        reachable = newest_good(node.files, (RUN, MOUNTED))
        expected = reachable.get(ours, 0) if ours else max(reachable.values(), default=0)
        assert step == expected, self._told(node, f"resumed from step {step}, not {expected}")
        self.endings["from a checkpoint" if step else "from the start"] += 1

    def _check_refusal(self, node: Node, message: str) -> None:
        """Only where the mirror is empty that was not, or is another run's."""
        self.endings["refused"] += 1
        ours, theirs = self._id_of(node.files), _identity_in(node.files, f"{MOUNTED}/run/identity.json")
        away = "is empty now; mount the drive" in message and theirs is None
        foreign = "holds another run of this name" in message and ours != theirs
        assert away or foreign, self._told(node, message)

    def _check_mirrored(self, node: Node, failed: str | None) -> None:
        """What was saved and is good reaches a mirror that is there."""
        name = f"step-{node.memory.saved:08d}"
        good = any(copy.place == RUN and copy.step == node.memory.saved for copy in good_copies(node.files))
        is_mirror = MOUNTED not in node.files and (not node.memory.claimed or _OWNER in node.files)
        if not is_mirror or not good:
            return
        ours, theirs = self._id_of(node.files), _identity_in(node.files, f"{MOUNTED}/run/identity.json")
        if theirs not in (None, ours):
            return
        there = any(copy.path.endswith(f"{MOUNTED}{_THERE}{name}") for copy in good_copies(self._read()))
        assert failed is None and there, self._told(node, f"{name} was not mirrored: {failed}")

    def _id_of(self, files: Files) -> str | None:
        """Of the run that a new process here continues: the run folder's, else that of the mirror it can see."""
        here = _identity_in(files, f"{RUN}/identity.json")
        return here or _identity_in(files, f"{MOUNTED}/run/identity.json")

    def _told(self, node: Node, what: str) -> str:
        lines = [f"{name} {len(data)}" for name, data in sorted(node.files.items()) if not name.endswith("/")]
        return "\n".join([what, *(f"after: {step}" for step in node.path), *lines])

    # The folders.

    def _put(self, files: Files) -> None:
        """Makes the folders hold `files`; only what differs is written."""
        for name in sorted(self._known.keys() - files.keys(), reverse=True):
            path = self.folder / name
            if name.endswith("/"):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for name in sorted(files):
            if name.endswith("/"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            elif files[name] is not self._known.get(name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(files[name])
        self._known = files

    def _read(self, dead: bool = False, synced_alone: bool = False) -> Files:
        """`dead`: the names of temporary files are those of a process that is gone."""
        files: Files = {}

        def read(folder: str, under: str) -> None:
            for entry in os.scandir(folder):
                name = under + (_PID.sub(_DEAD_PID, entry.name) if dead and entry.name[0] == "." else entry.name)
                if entry.is_dir(follow_symlinks=False):
                    files[f"{name}/"] = b""
                    read(entry.path, f"{name}/")
                else:
                    data = b"" if synced_alone and entry.inode() in self._unsynced else _content(entry.path)
                    files[name] = self._contents.setdefault(data, data)

        read(str(self.folder), "")
        return files

    def _record(self) -> None:
        if self._kills is None:
            return
        for synced_alone in (False, True) if self.power_cuts and self._unsynced else (False,):
            files = self._read(dead=True, synced_alone=synced_alone)
            if not self._kills or files != self._kills[-1]:
                self._kills.append(files)

    @contextmanager
    def _disk_calls_recorded(self) -> Iterator[None]:
        def recorded(real: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                self._record()
                real(*arguments)

            return call

        def write(file: Any, data: Any) -> None:
            view = memoryview(data).cast("B")
            half = len(view) // 2
            for part in (view[:half], view[half:]):
                self._record()
                self._unsynced.add(os.fstat(file.fileno()).st_ino)
                real_write(file, part)
            self._record()

        def sync(handle: int) -> None:
            self._unsynced.discard(os.fstat(handle).st_ino)

        real_write = disk.write
        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "unlink", "make_folder"):
                patch.setattr(disk, name, recorded(getattr(disk, name)))
            patch.setattr(disk, "write", write)
            patch.setattr(disk, "sync", sync)
            yield

    @contextmanager
    def _names_fixed(self) -> Iterator[None]:
        """Random names are counted instead, so that equal states look equal."""

        def new_identity(settings: str) -> Identity:
            self._births += 1
            return Identity(f"{self._births:016x}", settings, "a test")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recovery, "new_identity", new_identity)
            patch.setattr(mirror_claim.secrets, "token_hex", lambda size: f"{self._births:0{2 * size}x}")
            yield


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder, in memory where there is such a disk: thousands of small files are written."""
    shm = Path("/dev/shm")  # noqa: S108
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


class _Absent(PathMirror):
    def put_file(self, file: Path, name: str) -> None:
        raise MirrorFailed("not here")


def _silent(line: str) -> None:
    pass


def _content(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 1 << 20)
    finally:
        os.close(handle)


def _remember(run: RunFolder, memory: Memory | None) -> None:
    checkpoint_module._verified.clear()
    for step in memory.verified if memory is not None else ():
        checkpoint_module._remember(run.checkpoints / f"step-{step:08d}")


def _moved(files: Files, moves: dict[str, str]) -> Files:
    """With the first folder of each path renamed."""
    moved = {}
    for name, data in files.items():
        first, _, rest = name.partition("/")
        moved[f"{moves.get(first, first)}/{rest}"] = data
    return moved


def _below(files: Files, place: str) -> Files:
    return {name: data for name, data in files.items() if name.startswith(f"{place}/")}


def _identity_in(files: Files, name: str) -> str | None:
    try:
        return str(json.loads(files[name])["run_id"])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True)
class Copy:
    place: str
    step: int
    run_id: str
    path: str


def good_copies(files: Files) -> Iterator[Copy]:
    """The complete, undamaged checkpoints, in any place. In a mirror, those that have a seal."""
    for name in files:
        if not name.endswith("/manifest.json"):
            continue
        path = name.removesuffix("/manifest.json")
        place, _, rest = path.partition("/")
        match = re.fullmatch(
            r"checkpoints/step-(\d{8})" if place == RUN else r"run/checkpoints/(?:\.old-)?step-(\d{8})", rest
        )
        if match and (place == RUN or f"{path}/.mirror.json" in files) and _is_whole(files, path):
            yield Copy(place, int(match[1]), json.loads(files[f"{path}/state.json"])["run_id"], path)


def _is_whole(files: Files, path: str) -> bool:
    try:
        manifest = json.loads(files[f"{path}/manifest.json"])
        return all(hashlib.sha256(files[f"{path}/{file}"]).hexdigest() == manifest[file]["sha256"] for file in _LISTED)
    except (KeyError, ValueError):
        return False


def newest_good(files: Files, places: tuple[str, ...]) -> dict[str, int]:
    """By run id: the newest step with a good copy in one of `places`."""
    newest: dict[str, int] = {}
    for copy in good_copies(files):
        if copy.place in places:
            newest[copy.run_id] = max(newest.get(copy.run_id, 0), copy.step)
    return newest
