"""Nodes that share no disk: the node with the newest checkpoint sends it to those that lack it.

A resumed run may be on other nodes than before, and rank 0 on another one. All ranks resume from the newest undamaged
checkpoint that any node has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from sojourn.errors import RunFailed
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.storage.stage import staged
from sojourn.train.ranks import Ranks

_CHUNK_BYTES = 64 << 20


def sync_checkpoint(run: RunFolder, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Afterwards every node's run folder has the newest undamaged checkpoint of all nodes."""
    if ranks.world_size == 1:
        return
    newest = _newest(run.checkpoints) if ranks.is_local_main else None
    steps = [int(text) for text in ranks.all_gather(str(-1 if newest is None else step_of(newest)))]
    newest_step, mains = max(steps), ranks.all_gather(str(int(ranks.is_local_main)))
    lacking = [rank for rank, step in enumerate(steps) if step < newest_step and mains[rank] == "1"]
    if not lacking:
        return
    source = steps.index(newest_step)
    # Rank 0 also needs the run's files, which are more recent on the source.
    run_files = [run.config, run.environment, run.metrics, run.events, run.ledger, run.ladder]
    files = [path for path in run_files if path.is_file()] if 0 in lacking else []
    paths = [*files, *sorted(newest.iterdir())] if newest is not None and ranks.rank == source else []
    names = [(str(path.relative_to(run.path)), path.stat().st_size) for path in paths]
    listed = json.loads(ranks.all_gather(json.dumps(names))[source])
    _send(run, ranks, source, listed, writes=ranks.rank in lacking)
    if ranks.rank in lacking:
        say(f"the checkpoint of step {newest_step} was copied from another node of this run")


def _newest(folder: Path) -> Path | None:
    return next((path for path in reversed(list_checkpoints(folder)) if find_damage(path) is None), None)


def _send(run: RunFolder, ranks: Ranks, source: int, listed: list[tuple[str, int]], writes: bool) -> None:
    checkpoint = [(name, size) for name, size in listed if name.startswith("checkpoints/")]
    for name, size in listed:
        if (name, size) not in checkpoint:
            _write(run.path / name, _receive(run.path / name, size, ranks, source), writes)
    target = run.path / Path(checkpoint[0][0]).parent
    if not writes:
        for name, size in checkpoint:
            _write(run.path / name, _receive(run.path / name, size, ranks, source), False)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        for name, size in checkpoint:
            _write(stage / Path(name).name, _receive(run.path / name, size, ranks, source), True)
        if find_damage(stage) is not None:
            raise RunFailed(f"{target}: damaged on the way from another node; run the same command again")


def _write(path: Path, chunks: Iterator[bytes], writes: bool) -> None:
    if not writes:
        for _ in chunks:
            pass
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _receive(path: Path, size: int, ranks: Ranks, source: int) -> Iterator[bytes]:
    """Broadcasts a file of rank `source` chunk by chunk; all ranks take part."""
    import numpy as np
    import torch
    import torch.distributed as dist

    is_source = ranks.rank == source
    with path.open("rb") if is_source else nullcontext() as file:
        for start in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - start)
            data = bytearray(file.read(length)) if file is not None else bytearray(length)
            tensor = torch.from_numpy(np.frombuffer(data, np.uint8)).to(ranks.device)
            dist.broadcast(tensor, source)
            yield tensor.cpu().numpy().tobytes()
