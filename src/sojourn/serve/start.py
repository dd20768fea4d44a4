"""`sojourn serve` from its command line to a listening server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from sojourn.errors import UserError
from sojourn.serve.auth import KeyRing
from sojourn.serve.engines.choose import EngineOptions, open_engine
from sojourn.serve.settings import Settings
from sojourn.web.address import bind, is_loopback

_NEEDED = ("fastapi", "uvicorn", "httptools", "llguidance")


def start(model: str, settings: Settings, keys: KeyRing, options: EngineOptions, feedback: str | None = None) -> None:
    """Until a signal ends it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}; type: pip install 'sojourn[train,serve]'")
    from sojourn.infer.find import find_model
    from sojourn.serve.feedback import feedback_folder
    from sojourn.serve.gateway import Gateway
    from sojourn.serve.request_log import RequestLog
    from sojourn.serve.server import run_server

    found = find_model(model, options.checkpoint)
    name = options.name or _name_of(model, found.path)
    opinions = feedback_folder(feedback, is_loopback(settings.host))
    engine = open_engine(found, options)
    with bind(settings.host, settings.port) as listening:
        address = f"http://{settings.host}:{listening.getsockname()[1]}"
        print(f"{name}: {address}/v1 (loading; Ctrl-C ends)", file=sys.stderr, flush=True)
        saved = f"; thumbs and corrections go to {opinions.folder} (--feedback off: nowhere)" if opinions else ""
        print(f"chat page: {address}{saved}", file=sys.stderr, flush=True)
        gateway = Gateway(engine, settings, keys, RequestLog(), name, model, options.adapters, opinions)
        run_server(gateway, listening)


def _name_of(given: str, path: Path) -> str:
    """A run's name as it was given; else the folder's."""
    return given if "/" not in given and "\\" not in given else path.stem if path.suffix == ".gguf" else path.name
