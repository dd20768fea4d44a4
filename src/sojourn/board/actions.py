"""What the page can do with a run: each is a line that one could type, started as a task; only stopping a run on this
machine and checking a checkpoint are done at once."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from sojourn.board.live_runs import KnownRun
from sojourn.board.schemas import Action
from sojourn.board.tasks import Tasks
from sojourn.errors import UserError
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder

EXPORTS = ("hf", "gguf", "gguf-adapter", "onnx", "mlx", "vllm")
_WHAT = ("final", "best", "checkpoint", "all")


def act(run: KnownRun, action: str, body: Action, tasks: Tasks) -> dict[str, Any]:
    found = _ACTIONS.get(action)
    if found is None:
        raise UserError(f"no action is called {action[:40]!r}; there are: {', '.join(_ACTIONS)}")
    return found(run, body, tasks)


def _stop(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    return _task(tasks, ["stop", _name(run)], run)


def _resume(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    if run.folder is None:
        host = str(run.values["host"])
        raise UserError(
            f"a run on {host} goes on with the same launch, or: sojourn move {run.values['name']} --to HOST"
        )
    if run.values["state"] in ("starting", "running"):
        raise UserError(f"{run.id}: runs already")
    return _task(tasks, ["train", str(run.folder.path)], run)


def _pull(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    what = body.what or "final"
    if run.folder is not None:
        raise UserError(f"{run.id}: is on this machine already, in {run.folder.path}")
    if what not in _WHAT:
        raise UserError(f"what: {what[:40]!r}; there are: {', '.join(_WHAT)}")
    return _task(tasks, ["pull", str(run.values["name"]), "--what", what], run)


def _move(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    if run.folder is not None:
        raise UserError(f"{run.id}: a run on this machine is not moved; start it there: sojourn launch … --on HOST")
    return _task(tasks, ["move", str(run.values["name"]), "--to", _word(body.to, "to", "a host"), "--detach"], run)


def _verify(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    damage = find_damage(_checkpoint(run, body))
    return {"damage": damage, "whole": damage is None}


def _export(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    to = body.to or "hf"
    if to not in EXPORTS:
        raise UserError(f"to: {to[:40]!r}; there are: {', '.join(EXPORTS)}")
    words = ["export", _folder(run), "--to", to, *_checkpoint_option(run, body)]
    if body.quantize:
        words += ["--quantize", _word(body.quantize, "quantize", "a name")]
    return _task(tasks, words, run)


def _chat(run: KnownRun, body: Action, tasks: Tasks) -> dict[str, Any]:
    """A server of its own on a free port, with the chat page; `beside`: another model."""
    port = _free_port()
    chosen = _checkpoint_option(run, body)
    words = ["serve", "@".join([_folder(run), *chosen[1:]]), "--port", str(port)]
    if body.beside:
        words += ["--model", _word(body.beside, "beside", "a run or a folder")]
    url = f"http://127.0.0.1:{port}/"
    return {**_task(tasks, words, run, url), "url": url}


_ACTIONS = {
    "stop": _stop, "resume": _resume, "pull": _pull, "move": _move, "verify": _verify, "export": _export, "chat": _chat,
}  # fmt: skip


def _task(tasks: Tasks, words: list[str], run: KnownRun, url: str | None = None) -> dict[str, Any]:
    return {"task": tasks.start(words, run.id, url)}


def _name(run: KnownRun) -> str:
    return str(run.folder.path) if run.folder is not None else str(run.values["name"])


def _folder(run: KnownRun) -> str:
    if run.folder is None:
        raise UserError(f"{run.id}: is not on this machine; bring it home first: sojourn pull {run.values['name']}")
    return str(run.folder.path)


def _checkpoint(run: KnownRun, body: Action) -> Path:
    folder, step = RunFolder(Path(_folder(run))), body.checkpoint
    found = next((path for path in list_checkpoints(folder.checkpoints) if step_of(path) == step), None)
    if found is None:
        raise UserError(f"{run.id}: no checkpoint of step {step}")
    return found


def _checkpoint_option(run: KnownRun, body: Action) -> list[str]:
    chosen = body.checkpoint
    if chosen in (None, "", "final"):
        return []
    if chosen == "best":
        return ["--checkpoint", "best"]
    return ["--checkpoint", str(step_of(_checkpoint(run, body)))]


def _word(value: str | None, key: str, what: str) -> str:
    if value is None or not value.strip() or value.startswith("-") or not value.isprintable():
        raise UserError(f"{key}: {what} is needed")
    return value.strip()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
