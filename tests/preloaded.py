"""One Python that imports torch and transformers for all tests: the workers of pytest-xdist and their fork servers are
forks of it.

The imports take eight seconds of CPU time, and four workers with a fork server each would make them eight times.
`Preloaded.command` stands for `python`: it has a fork run the code of its `-c`, with its standard files, environment
and current folder, and ends when the fork ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("torch", "transformers", "peft", "sojourn", "deepspeed", "safetensors", "tokenizers", "bitsandbytes")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
THREADS["OMP_WAIT_POLICY"] = "PASSIVE"  # a command that sets more threads: none of them spins while it waits
# What tests, and the commands that they start, import sooner or later.
OTHERS = (
    "asyncssh", "fastapi", "gguf", "numpy.ctypeslib", "numpy.ma", "openai", "platformdirs", "py3langid.langid",
    "pyarrow.parquet", "torch.distributed.launcher.api", "torch.utils.tensorboard", "typer._adapters", "uvicorn",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
)  # fmt: skip
SCRIPTS = ("sojourn.__main__",)
MAIN = "from sojourn.cli.main import main; main()"


def can_preload() -> bool:
    """Not beside a GPU: a fork cannot use one that its parent may have opened."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or a sandbox that does not allow it
        return False
    return not Path("/dev/nvidiactl").exists()


class Preloaded:
    """The tests' end of it. It imports while the tests are still being set up; who asks for a fork waits."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        path = str(Path(self._folder.name) / "socket")
        self.command = [sys.executable, "-I", "-S", __file__, path]
        imports = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-c", "import preloaded; preloaded.serve()", str(listener.fileno())],
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, env={**os.environ, **THREADS, **imports},
            )  # fmt: skip

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()


def serve() -> None:
    """Until standard input ends: the tests have."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the forks as well, and they decide
    gc.disable()
    preload()
    gc.freeze()
    listener = socket.socket(fileno=int(sys.argv[1]))
    running: dict[socket.socket, tuple[int, int]] = {}
    while True:
        ended = {descriptor: asker for asker, (_, descriptor) in running.items()}
        ready, _, _ = select.select([0, listener, *running, *ended], [], [])
        if 0 in ready:
            break
        for one in ready:
            if one is listener:
                asker, _ = listener.accept()
                pid = _fork(asker)
                running[asker] = pid, os.pidfd_open(pid)
            elif one in running:  # who asked is gone
                os.kill(running[one][0], signal.SIGKILL)
            elif ended[one] in running:
                _send_exit_code(ended[one], *running.pop(ended[one]))
    for pid, _ in running.values():
        os.kill(pid, signal.SIGKILL)


def _send_exit_code(asker: socket.socket, pid: int, descriptor: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    with asker, contextlib.suppress(OSError):
        asker.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _fork(asker: socket.socket) -> int:
    message, files, _, _ = socket.recv_fds(asker, 1 << 16, 3)
    while not message.endswith(b"\n"):
        message += asker.recv(1 << 16)
    pid = os.fork()
    if not pid:
        _run(json.loads(message), files)
    for file in files:
        os.close(file)
    return pid


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    gc.enable()
    become_new_process(*files)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    run_and_exit(request["args"], code=request["code"])


def preload() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import sojourn
    from sojourn.catalog.platforms import platforms
    from sojourn.cli.main import command_tree
    from sojourn.config.load import load_run
    from sojourn.data.clean.language import detect_language
    from sojourn.remote import wheel
    from sojourn.train.metrics.environment import describe_environment

    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401
    ours = [found.name for found in pkgutil.walk_packages(sojourn.__path__, "sojourn.") if found.name not in SCRIPTS]
    for module in (*OTHERS, *ours):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.suppress(ImportError):  # hundreds of patterns that transformers compiles once per process
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")
    with contextlib.suppress(ImportError):  # the template of the README that peft writes beside every adapter
        import jinja2

        jinja2.Environment.compile = functools.lru_cache(64)(jinja2.Environment.compile)  # type: ignore[method-assign]
    # A client reads the certificates of all authorities; Kaggle's bundle has our wheel.
    ssl.create_default_context = functools.lru_cache(8)(ssl.create_default_context)  # type: ignore[assignment]
    wheel._archive = _archive_once(wheel._archive)  # type: ignore[assignment]
    if not torch.cuda.is_available():  # else each seed is kept for GPUs, with the stack of who set it
        torch.cuda.manual_seed_all = lambda seed: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    platforms()
    command_tree()  # what these find out once per process, every fork knows
    load_run(["smoke"])
    describe_environment("cpu")
    detect_language("Ein Satz, damit das Modell gelesen ist.")


def _archive_once(archive: Callable[[Mapping[str, bytes]], bytes]) -> Callable[[Mapping[str, bytes]], bytes]:
    """The same files are compressed once per process."""
    made: dict[bytes, bytes] = {}

    def once(files: Mapping[str, bytes]) -> bytes:
        [record] = (content for name, content in files.items() if name.endswith("/RECORD"))  # has their hashes
        if record not in made:
            made[record] = archive(files)
        return made[record]

    return once


def run_and_exit(args: list[str], preamble: str = "", modules: Path | None = None, code: str = MAIN) -> NoReturn:
    """As the interpreter runs a module or `code`, and ends."""
    status = 1
    try:
        known: dict[str, Any] = {"rank": int(os.environ.get("RANK", "0")), "os": os, "signal": signal}
        exec(preamble, known)  # noqa: S102
        sys.argv = ["sojourn", *args]
        exec(code, {"__name__": "__main__"})  # noqa: S102
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program has ended: what follows is ours
        if modules:
            modules.write_text(json.dumps([name for name in sys.modules if name.partition(".")[0] in MODULES]))
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def become_new_process(stdin: int, stdout: int, stderr: int, keep: Any = ()) -> None:
    """As after an exec: only standard files are open, no signal is handled, nothing of the parent is cleaned up at the
    end."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    null = os.open(os.devnull, os.O_RDWR)
    for number, given in enumerate((stdin, stdout, stderr)):
        if given >= 0:
            os.dup2(given, number)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):
                os.dup2(null, number)  # the number stays taken: an object of before may still close it
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _ask(path: str, words: list[str]) -> int:
    """What `Preloaded.command` does: `words` are those of a Python."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at = words.index("-c")
    request = {"code": words[at + 1], "args": words[at + 2 :], "env": dict(os.environ), "cwd": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
        asked.sendall(b"\n")
        return int(asked.recv(16) or 1)


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1], sys.argv[2:]))
