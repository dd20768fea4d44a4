"""Which model a name means: a GGUF file, a model's folder, a run at its end or at one of its checkpoints."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.run.checkpoints import MANIFEST, checkpoint_path, find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.run.home import find_run, home
from sojourn.run.identity import MODEL_MARK, parse_identity, read_identity
from sojourn.storage.files import read_json, read_json_object

MODEL_FILES = ("config.json", ADAPTER_FILE)


@dataclass(frozen=True)
class FoundModel:
    """`path`: a GGUF file, a folder that transformers or peft opens, or a checkpoint. `run`: which it belongs to."""

    path: Path
    run: RunFolder | None = None
    is_checkpoint: bool = False


def find_model(name: str, checkpoint: str | None = None) -> FoundModel:
    """`checkpoint`: final, best, latest or a step of the run `name`, which may also be given as RUN@CHECKPOINT. Without
    it, `final/`, or the newest good checkpoint of a run that has none, which a line says."""
    if checkpoint is None:
        name, checkpoint = split_checkpoint(name)
    path = checkpoint_path(expand_user(name))
    is_model = (path.suffix == ".gguf" and path.is_file()) or _is_model(path)
    is_checkpoint = (path / MANIFEST).is_file() and (path / "state.json").is_file()
    if checkpoint is not None and (is_model or is_checkpoint):
        raise UserError(f"--checkpoint: {name} is one model already; name its run to choose among several")
    if is_model:
        run = RunFolder(path.parent)
        return FoundModel(path, run if run.exists() else None)
    if is_checkpoint:
        return _checked(path, _run_of(path))
    run = find_run(name)
    if checkpoint is None and _is_model(run.final):
        return FoundModel(run.final, run)
    if checkpoint is None:
        return _newest(run, say_step=True)
    return _chosen(run, checkpoint)


def adapter_folder(given: str) -> Path:
    """Of an adapter, or of a run whose final model is one."""
    path = find_model(given).path
    if not (path / ADAPTER_FILE).is_file():
        raise UserError(f"{path} is not an adapter: it has no {ADAPTER_FILE}")
    return path


def split_checkpoint(name: str) -> tuple[str, str | None]:
    """The run and the checkpoint of RUN@CHECKPOINT. A file, folder or run that has such a name goes first."""
    run, at, checkpoint = name.rpartition("@")
    if not at or expand_user(name).exists() or RunFolder(home() / "runs" / name).exists():
        return name, None
    return run, checkpoint


def _is_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in MODEL_FILES)


def _chosen(run: RunFolder, checkpoint: str) -> FoundModel:
    if checkpoint == "latest":
        return _newest(run)
    models = {"final": run.final, "best": run.best}
    there = {name: folder for name, folder in models.items() if _is_model(folder)}
    if checkpoint in there:
        return FoundModel(there[checkpoint], run)
    steps = {step_of(path): path for path in list_checkpoints(run.checkpoints)}
    if re.fullmatch(r"[0-9]{1,12}", checkpoint):
        step = int(checkpoint)
        if step in steps:
            return _checked(steps[step], run)
        for folder in there.values():
            if read_json_object(folder / MODEL_MARK).get("step") == step:
                return FoundModel(folder, run)
    known = ", ".join([*there, *(["latest"] if steps else []), *map(str, sorted(steps))])
    why = "; best needs train.eval_every" if checkpoint == "best" else ""
    raise UserError(f"--checkpoint {checkpoint}: {run.path} has no such one{why}; there are: {known or 'none yet'}")


def _newest(run: RunFolder, say_step: bool = False) -> FoundModel:
    """The newest good checkpoint. Nothing is changed: a damaged one is left to the next training."""
    for path in reversed(list_checkpoints(run.checkpoints)):
        damage = find_damage(path, parts=("model",))
        if damage is None:
            if say_step:
                status = run.status()
                state = f"{status.state}, step {status.step} of {status.total_steps}" if status else "not finished"
                _say(f"note: {run.path.name} has no final model ({state}); opened at step {step_of(path)}")
            return FoundModel(path, run, is_checkpoint=True)
        _say(f"warning: {path} is damaged ({damage}); trying the one before it")
    status = run.status()
    progress = f" (step {status.step} of {status.total_steps})" if status else ""
    raise UserError(
        f"{run.path}: no checkpoint yet{progress}; Ctrl-C in its training saves one; train it with: "
        f"sojourn train {run.config}"
    )


def _checked(path: Path, run: RunFolder) -> FoundModel:
    damage = find_damage(path, parts=("model",))
    if damage is not None:
        raise UserError(f"{path}: not a complete checkpoint ({damage}); take another one: --checkpoint latest")
    return FoundModel(path, run, is_checkpoint=True)


def _run_of(path: Path) -> RunFolder:
    """The run of a checkpoint's folder; one that was written or copied elsewhere names it by its id."""
    run = RunFolder(path.resolve().parent.parent)
    if run.exists():
        return run
    mark, runs = parse_identity(read_json(path / "state.json")), home() / "runs"
    for folder in runs.iterdir() if mark is not None and runs.is_dir() else ():
        identity = read_identity(folder / "identity.json")
        if identity is not None and mark is not None and identity.run_id == mark.run_id:
            return RunFolder(folder)
    raise UserError(f"{path}: a checkpoint without its run, whose settings it needs; move it to RUN/checkpoints/")


def _say(line: str) -> None:
    """Standard output is for what was asked, such as JSON."""
    print(line, file=sys.stderr, flush=True)
