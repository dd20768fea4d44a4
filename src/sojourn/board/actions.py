"""What the page can do with a run: each is a line that one could type, started as a task; only checking a checkpoint is
done at once."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.board.live_runs import KnownRun
from sojourn.board.schemas import Action
from sojourn.board.tasks import Tasks, command_line
from sojourn.errors import UserError
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder

EXPORTS = ("hf", "gguf", "gguf-adapter", "onnx", "mlx", "vllm")
_WHAT = ("final", "best", "checkpoint", "all")
_CHAT_PORT = 8766  # or the first free one above


@dataclass(frozen=True)
class Command:
    """`words`: after `sojourn`; `url`: where what it starts can be seen."""

    words: list[str]
    url: str | None = None


def act(run: KnownRun, action: str, body: Action, tasks: Tasks) -> dict[str, Any]:
    if action == "verify":
        damage = find_damage(_checkpoint(run, body))
        return {"damage": damage, "whole": damage is None}
    make = _COMMANDS.get(action)
    if make is None:
        raise UserError(f"no action is called {action[:40]!r}; there are: {', '.join(_COMMANDS)}, verify")
    command = make(run, body)
    if body.preview:
        return {"line": command_line(command.words)}
    return {"task": tasks.start(command.words, run.id, command.url), "url": command.url}


def _stop(run: KnownRun, body: Action) -> Command:
    return Command(["stop", _name(run)])


def _resume(run: KnownRun, body: Action) -> Command:
    if run.folder is None:
        host = str(run.values["host"])
        raise UserError(
            f"a run on {host} goes on with the same launch, or: sojourn move {run.values['name']} --to HOST"
        )
    if run.values["state"] in ("starting", "running"):
        raise UserError(f"{run.id}: runs already")
    return Command(["train", str(run.folder.path)])


def _pull(run: KnownRun, body: Action) -> Command:
    what = body.what or "final"
    if run.folder is not None:
        raise UserError(f"{run.id}: is on this machine already, in {run.folder.path}")
    if what not in _WHAT:
        raise UserError(f"what: {what[:40]!r}; there are: {', '.join(_WHAT)}")
    return Command(["pull", str(run.values["name"]), "--what", what])


def _move(run: KnownRun, body: Action) -> Command:
    if run.folder is not None:
        raise UserError(f"{run.id}: a run on this machine is not moved; start it there: sojourn launch … --on HOST")
    return Command(["move", str(run.values["name"]), "--to", _word(body.to, "to", "a host"), "--detach"])


def _export(run: KnownRun, body: Action) -> Command:
    to = body.to or "hf"
    if to not in EXPORTS:
        raise UserError(f"to: {to[:40]!r}; there are: {', '.join(EXPORTS)}")
    words = ["export", _folder(run), "--to", to, *_checkpoint_option(run, body)]
    if body.quantize:
        words += ["--quantize", _word(body.quantize, "quantize", "a name")]
    return Command(words)


def _chat(run: KnownRun, body: Action) -> Command:
    """A server of its own on a free port, with the chat page; `beside`: another model."""
    port, chosen = _free_port(), _checkpoint_option(run, body)
    words = ["serve", "@".join([_folder(run), *chosen[1:]]), "--port", str(port)]
    if body.beside:
        words += ["--model", _word(body.beside, "beside", "a run or a folder")]
    return Command(words, f"http://127.0.0.1:{port}/")


_COMMANDS = {"stop": _stop, "resume": _resume, "pull": _pull, "move": _move, "export": _export, "chat": _chat}


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
    """The first: a line that was shown is the line that is started."""
    for port in range(_CHAT_PORT, _CHAT_PORT + 1000):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no port from {_CHAT_PORT} on is free")
