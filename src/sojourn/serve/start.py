"""`sojourn serve` from its command line to a listening server."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.errors import UserError
from sojourn.serve.auth import KeyRing
from sojourn.serve.engines.base import EngineOptions
from sojourn.serve.engines.choose import choose_engine, open_engine
from sojourn.serve.settings import Settings
from sojourn.web.address import bind, is_loopback, url_of

if TYPE_CHECKING:
    from sojourn.serve.deployment import Deployment

_NEEDED = ("fastapi", "uvicorn", "httptools", "llguidance")


def start(
    models: Sequence[tuple[str | None, str]], settings: Settings, keys: KeyRing, options: EngineOptions,
    feedback: str | None = None,
) -> None:  # fmt: skip
    """Until a signal ends it. `models`: what to serve, each with its name in the API (None: as it is given). The first
    is the one that `options.checkpoint` and `options.adapters` belong to."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}; type: pip install 'sojourn[train,serve]'")
    from sojourn.serve.feedback import feedback_folder
    from sojourn.serve.gateway import Gateway
    from sojourn.serve.request_log import RequestLog
    from sojourn.serve.server import run_server

    deployments = _deployments(models, options)
    opinions = feedback_folder(feedback, is_loopback(settings.host))
    with bind(settings.host, settings.port) as listening, closing(RequestLog()) as log:
        gateway = Gateway(deployments, settings, keys, log, opinions)
        address = url_of(listening)
        names = ", ".join(one.name for one in deployments)
        saved = f"; thumbs and corrections go to {opinions.folder} (--feedback off: nowhere)" if opinions else ""
        lines = (f"{names}: {address}/v1 (loading; Ctrl-C ends)", f"chat page: {address}{saved}")
        run_server(gateway, listening, lambda: _say(*lines))


def _deployments(models: Sequence[tuple[str | None, str]], options: EngineOptions) -> list[Deployment]:
    from sojourn.infer.find import find_model
    from sojourn.serve.deployment import Deployment
    from sojourn.serve.memory import share_memory

    found = {}
    for at, (given, source) in enumerate(models):
        model = find_model(source, options.checkpoint if at == 0 else None)
        name = given or _name_of(source, model.path)
        if name in found:
            raise UserError(f"two models are called {name}; name one of them: --model NAME={source}")
        found[name] = (source, model, choose_engine(model, options))
    ours = {name: model for name, (_, model, engine) in found.items() if engine == "builtin"}
    line, share = share_memory(ours, options.device, options.quantization)
    if line:
        _say(line)
    deployments = []
    for at, (name, (source, model, engine)) in enumerate(found.items()):
        own = replace(options, engine=engine, name=name, kv_bytes=share, models=len(found))
        if at:
            own = replace(own, adapters={})
        deployments.append(Deployment(name, open_engine(model, own), source, own.adapters))
    return deployments


def _name_of(given: str, path: Path) -> str:
    """A run's name as it was given; else the folder's."""
    return given if "/" not in given and "\\" not in given else path.stem if path.suffix == ".gguf" else path.name


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
