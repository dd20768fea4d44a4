"""The servers of `sojourn bench serve`, each a process of its own: ours, vLLM's, and transformers' `generate`, which
answers one request after another."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sojourn.bench.serve.client import Address
from sojourn.bench.serve.load import Asked
from sojourn.errors import RunFailed, UserError

_START_SECONDS = 900.0


@contextlib.contextmanager
def our_server(model: str, arguments: list[str]) -> Iterator[Address]:
    """`sojourn serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sojourn", "serve", model, "--port", str(port), "--name", "model", *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log) as child,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}", child, log)
            yield Address(port)
        finally:
            child.terminate()
            try:
                child.wait(timeout=60)
            except subprocess.TimeoutExpired:
                child.kill()


def _wait(url: str, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            log.seek(0)
            last = (log.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise RunFailed(f"sojourn serve ended with code {child.returncode}: {last}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RunFailed(f"sojourn serve was not ready within {_START_SECONDS:.0f} s")


@contextlib.contextmanager
def vllm_server(model: Path, max_length: int) -> Iterator[Address]:
    from sojourn.infer.runtimes.managed_environment import VLLM
    from sojourn.infer.runtimes.vllm_server import VllmServer

    if reason := VLLM.why_unavailable():
        raise UserError(reason)
    server = VllmServer([str(model), "--served-model-name", "model", "--max-model-len", str(max_length)])
    try:
        yield Address(path=str(server.socket))
    finally:
        server.close()


def transformers_rows(model: str, device: str, asked: list[Asked]) -> tuple[list[dict[str, Any]], float]:
    """`generate`, one request after another, in a process of its own: times of each, and seconds in all."""
    task = json.dumps({"model": model, "device": device, "asked": [[list(one.prompt), one.tokens] for one in asked]})
    command = [sys.executable, "-c", "from sojourn.bench.serve.servers import generate_child; generate_child()"]
    done = subprocess.run(command, input=task, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"transformers.generate: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["rows"], found["seconds"]


def generate_child() -> None:
    import torch

    from sojourn.infer.load import load_model

    task = json.load(sys.stdin)
    loaded = load_model(task["model"], task["device"])
    rows = []

    def generate(ids: list[int], tokens: int) -> tuple[float, float]:
        began = time.perf_counter()
        times: list[float] = []

        class Streamer:
            def put(self, value: Any) -> None:
                times.append(time.perf_counter() - began)

            def end(self) -> None:
                pass

        loaded.model.generate(
            torch.tensor([ids], device=loaded.device), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            streamer=Streamer(), pad_token_id=0,
        )  # fmt: skip
        return times[1], time.perf_counter() - began  # the first put has the prompt

    generate(task["asked"][0][0], 4)
    started = time.perf_counter()
    for ids, tokens in task["asked"]:
        first, total = generate(ids, tokens)
        rows.append({"first": first, "total": total, "tokens": tokens})
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - started}))
