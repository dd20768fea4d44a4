"""`sojourn serve`: an OpenAI-compatible API over a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption
from sojourn.expand_user import expand_user

if TYPE_CHECKING:
    from pathlib import Path

    from sojourn.serve.auth import KeyRing


def serve(
    model: str | None = typer.Argument(
        None,
        help="Name or folder of a run (RUN@STEP, RUN@best: one of its checkpoints); folder of a model, an adapter or a "
        "checkpoint; or a GGUF file.",
        show_default=False,
    ),
    more: list[str] | None = typer.Option(
        None, "--model", metavar="[NAME=]MODEL", help="One more model beside it. Repeatable.", show_default=False
    ),
    engine: str = typer.Option("auto", help="auto, builtin, vllm or llamacpp (for GGUF files)."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at. Other than this machine: needs an API key."),
    port: int = typer.Option(8000, min=0, max=65_535, help="Port; 0: any free one."),
    name: str | None = typer.Option(
        None, help="The model's name in the API; default: the folder's.", show_default=False
    ),
    adapter: list[str] | None = typer.Option(
        None,
        "--adapter",
        metavar="NAME=PATH",
        help="A LoRA adapter, of the first. Repeatable.",
        show_default=False,
    ),
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
    quantize: str | None = typer.Option(
        None, help="Weights at load: int8 (CPU), fp8, int8 or nf4 (CUDA); vLLM: fp8 or nf4.", show_default=False
    ),
    max_length: int | None = typer.Option(
        None, min=16, help="Longest prompt and answer together; default: the model's context.", show_default=False
    ),
    max_requests: int | None = typer.Option(
        None, min=1, help="Sequences that run at a time; default: what the memory holds.", show_default=False
    ),
    max_waiting: int = typer.Option(256, min=0, help="Sequences that may wait; beyond: 429."),
    api_key_file: str | None = typer.Option(
        None, help="A TOML file of API keys and their limits, readable by you only.", show_default=False
    ),
    new_api_key: str | None = typer.Option(
        None, metavar="NAME", help="Add a key to --api-key-file, print it, and exit.", show_default=False
    ),
    admin: bool = typer.Option(False, "--admin", help="With --new-api-key: it may load adapters and checkpoints."),
    key_requests_per_minute: int | None = typer.Option(None, min=1, help="Of each key.", show_default=False),
    key_concurrency: int | None = typer.Option(None, min=1, help="Requests at a time of each key.", show_default=False),
    key_tokens_per_day: int | None = typer.Option(None, min=1, help="Of each key.", show_default=False),
    cors_origin: list[str] | None = typer.Option(
        None, metavar="URL", help="A web page's origin that may use the API. Repeatable.", show_default=False
    ),
    allowed_host: list[str] | None = typer.Option(
        None, metavar="NAME", help="One more name of this machine in Host headers. Repeatable.", show_default=False
    ),
    request_timeout: float = typer.Option(600.0, min=1, help="Seconds that a request may take."),
    grace: float = typer.Option(30.0, min=0, help="Seconds that running requests have after SIGTERM."),
    max_body_mb: int = typer.Option(16, min=1, help="Largest body of a request, in MiB."),
    vllm_args: str = typer.Option(
        "", metavar="ARGS", help="Further options of vllm serve, in quotes; with --engine vllm.", show_default=False
    ),
    feedback: str | None = typer.Option(
        None,
        metavar="FOLDER",
        help="Where thumbs and corrections of the chat page are kept, or off; default: feedback in SOJOURN_HOME, "
        "or off if others can reach the server.",
        show_default=False,
    ),
    log_prompts: bool = typer.Option(False, "--log-prompts", help="Write prompts into the log."),
) -> None:
    """Serve a model with an OpenAI-compatible API and a chat page.

    Examples:

    sojourn serve small

    sojourn serve small@100 --model best=small@best

    sojourn serve --new-api-key phone --api-key-file keys.toml

    sojourn serve small --host 0.0.0.0 --api-key-file keys.toml
    """

    from sojourn.errors import UserError

    file = expand_user(api_key_file) if api_key_file else None
    if new_api_key is not None:
        _print_new_key(new_api_key, file, admin)
        return
    if model is None:
        raise UserError("which model? type: sojourn serve MODEL")
    from sojourn.serve.auth import Quota, load_keys
    from sojourn.serve.settings import Settings

    keys = load_keys(file, Quota(key_requests_per_minute, key_concurrency, key_tokens_per_day))
    _check_keys(host, keys)
    settings = Settings(
        host=host, port=port, max_waiting=max_waiting, max_body_bytes=max_body_mb << 20,
        request_seconds=request_timeout, grace_seconds=grace, origins=tuple(cors_origin or ()),
        hosts=tuple(allowed_host or ()), log_prompts=log_prompts,
    )  # fmt: skip
    from sojourn.serve.engines.base import EngineOptions
    from sojourn.serve.start import start

    limits = (max_length, max_requests)
    options = EngineOptions(engine, name, checkpoint, device, quantize, *limits, _adapters(adapter), vllm_args)
    start([(name, model), *map(_named, more or ())], settings, keys, options, feedback)


def _print_new_key(name: str, file: Path | None, admin: bool) -> None:
    from sojourn.errors import UserError

    if file is None:
        raise UserError(f"--new-api-key {name}: into which file? add: --api-key-file FILE")
    from sojourn.serve.auth import add_key

    print(add_key(file, name, admin))


def _check_keys(host: str, keys: KeyRing) -> None:
    from sojourn.errors import UserError
    from sojourn.web.address import is_loopback

    if not keys.keys and not is_loopback(host):
        raise UserError(
            f"--host {host}: others can reach it, so it needs an API key; type: sojourn serve --new-api-key me "
            "--api-key-file keys.toml, then add --api-key-file keys.toml"
        )


def _named(given: str) -> tuple[str | None, str]:
    name, equals, model = given.partition("=")
    return (name, model) if equals and name and "/" not in name and "\\" not in name else (None, given)


def _adapters(given: list[str] | None) -> dict[str, str]:
    from sojourn.errors import UserError

    found = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise UserError(f"--adapter {one}: expected NAME=PATH")
        found[name] = path
    return found
