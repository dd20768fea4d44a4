"""Machines that share no disk: whoever has the newest checkpoint sends it to those that lack it.

A run's processes may be spread over other machines than before, and the one that writes may be on another one. All
begin from the newest checkpoint that any of them has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed
from sojourn.run.folder import RunFolder
from sojourn.storage.stage import staged
from sojourn.train.checkpoint.checkpoint import find_damage, list_checkpoints, step_of
from sojourn.train.ranks import Ranks

_PIECE = 64 << 20


def sync_checkpoint(run: RunFolder, ranks: Ranks, say: Any) -> None:
    """Every machine's folder of this run has the newest good checkpoint of all when this returns."""
    if ranks.world_size == 1:
        return
    newest = _newest(run.checkpoints) if ranks.is_local_main else None
    steps = [int(text) for text in ranks.all_gather(str(-1 if newest is None else step_of(newest)))]
    best, here = max(steps), ranks.all_gather(str(int(ranks.is_local_main)))
    lacking = [rank for rank, step in enumerate(steps) if step < best and here[rank] == "1"]
    if not lacking:
        return
    source = steps.index(best)
    # The one that writes also needs what the run has written so far, which is more than it has itself.
    beginnings = [run.config, run.environment, run.metrics, run.events, run.ledger, run.ladder]
    files = [path for path in beginnings if path.is_file()] if 0 in lacking else []
    there = [*files, *sorted(newest.iterdir())] if newest is not None and ranks.rank == source else []
    names = [(str(path.relative_to(run.path)), path.stat().st_size) for path in there]
    listed = json.loads(ranks.all_gather(json.dumps(names))[source])
    _send(run, ranks, source, listed, writes=ranks.rank in lacking)
    if ranks.rank in lacking:
        say(f"the checkpoint of step {best} came from another machine of this run")


def _newest(folder: Path) -> Path | None:
    return next((path for path in reversed(list_checkpoints(folder)) if find_damage(path) is None), None)


def _send(run: RunFolder, ranks: Ranks, source: int, listed: list[tuple[str, int]], writes: bool) -> None:
    sealed = [(name, size) for name, size in listed if name.startswith("checkpoints/")]
    for name, size in listed:
        if (name, size) not in sealed:
            _write(run.path / name, _pieces(run.path / name, size, ranks, source), writes)
    target = run.path / Path(sealed[0][0]).parent
    if not writes:
        for name, size in sealed:
            _write(run.path / name, _pieces(run.path / name, size, ranks, source), False)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        for name, size in sealed:
            _write(stage / Path(name).name, _pieces(run.path / name, size, ranks, source), True)
        if find_damage(stage) is not None:
            raise RunFailed(f"{target}: arrived damaged from another machine; run the same command again")


def _write(path: Path, pieces: Iterator[bytes], really: bool) -> None:
    if not really:
        for _ in pieces:
            pass
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)


def _pieces(path: Path, size: int, ranks: Ranks, source: int) -> Iterator[bytes]:
    """A file of the source's, piece by piece; all processes take part."""
    import numpy as np
    import torch
    import torch.distributed as dist

    mine = ranks.rank == source
    with path.open("rb") if mine else _nothing() as file:
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            data = bytearray(file.read(length)) if mine else bytearray(length)
            tensor = torch.from_numpy(np.frombuffer(data, np.uint8)).to(ranks.device)
            dist.broadcast(tensor, source)
            yield tensor.cpu().numpy().tobytes()


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
