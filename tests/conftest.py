"""What tests share: a home of their own, and runs small enough to train in a second."""

from __future__ import annotations

import gc
import importlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import budget
from fork_server import ForkServer, do_not_wait_for_the_disk
from preloaded import Preloaded, can_preload
from shared import Shared, write_chats

if TYPE_CHECKING:
    from tiny import Tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is not worth a page of C++ frames
os.environ["COLUMNS"] = "120"  # whatever terminal, or none, the tests run in
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
do_not_wait_for_the_disk()
_HERE = Path(__file__).parent
_PYTHON = pytest.StashKey[list[str]]()
signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores it
for _ignored in ("SIGHUP", "SIGUSR1", "SIGUSR2"):  # by `nohup make test`, by `perf record make test`
    if hasattr(signal, _ignored):
        signal.signal(getattr(signal, _ignored), signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", choices=["check", "record"], help="CPU seconds per test: see tests/budget.py")


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("--budget")
    if mode:
        config.pluginmanager.register(budget.Budget(mode))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forks of one Python that has imported everything."""
    if can_preload():
        preloaded = Preloaded()
        config.add_cleanup(preloaded.close)
        config.stash[_PYTHON] = preloaded.command
        for spec in specs:
            spec.python = shlex.join(preloaded.command)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = node.config.stash.get(_PYTHON, [sys.executable])


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker imports everything at once, then all tests; the garbage collector never walks through them."""
    worker = getattr(session.config, "workerinput", None)
    if worker:
        gc.disable()
        for module in ("torch", "transformers", "peft", "sojourn.train.loop", "sojourn.cli.main"):
            importlib.import_module(module)
        if [Path(place).resolve() for place in session.config.args] == [_HERE]:
            _import_share_of_tests(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def _import_share_of_tests(number: int, workers: int) -> None:
    """In a fresh clone, pytest compiles tests as it collects them: 20 s of CPU time, but not in each worker."""
    for file in sorted(_HERE.glob("test_*.py"))[number::workers]:
        with suppress(Exception, pytest.skip.Exception):  # collection reports it
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # all workers in the same order
        budget.longest_file_first(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def few_objects_for_garbage_collections(pytestconfig: pytest.Config) -> Iterator[None]:
    """What the tests of a file have imported and cached stays; later collections do not look through it."""
    yield
    if hasattr(pytestconfig, "workerinput"):
        gc.collect()
        gc.freeze()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder that is also the home of runs and prepared data."""
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    """Starts commands in processes of their own that have everything imported."""
    worker = getattr(pytestconfig, "workerinput", {})
    server = ForkServer(tmp_path_factory.mktemp("fork-server"), worker.get("python", [sys.executable]))
    yield server
    server.close()


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """A user without special rights, in a folder of theirs: root may read all. Import what is needed before."""
    with tempfile.TemporaryDirectory() as folder:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        if root:
            nobody = 65534
            os.chown(folder, nobody, nobody)
            os.seteuid(nobody)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def chats(home: Path) -> Path:
    """400 short chats in a file."""
    return write_chats(home / "chats.jsonl")


@pytest.fixture
def words(chats: Path, home: Path, shared: Shared) -> list[str]:
    """The command line of a run that trains in about a second: `sojourn train` + these. Its data is prepared."""
    shared.copy_prepared(home)
    return [
        "smoke", f"data.sources={chats}", "model.d_model=64", "data.vocab_size=400", "data.max_length=64",
        "train.precision=fp32",  # `auto` is bf16 on some CPUs
        "train.global_batch=8", "train.steps=12", "log.every_steps=1", "log.tensorboard=off", "name=t",
    ]  # fmt: skip


@pytest.fixture
def base(home: Path, shared: Shared) -> Path:
    """A tiny Llama with random weights and the tokenizer of the chats, as plain transformers writes it."""
    return shared.copy_base(home)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, shared: Shared) -> Iterator[Tiny]:
    """One home for all tests of a file, and runs of about a second to disturb."""
    from tiny import tiny_home

    with tiny_home(tmp_path_factory.mktemp("home"), shared) as made:
        yield made


def clean_environment() -> dict[str, str]:
    """Without what the tests themselves ask of torch: what a user sees must be silenced by the command."""
    return {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}


def sojourn(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    command = [sys.executable, "-m", "sojourn", *arguments]
    given = {"timeout": 300, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **given)  # type: ignore[call-overload]


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same command in this process, which need not import everything anew."""
    from sojourn.cli.main import main

    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    on_term = signal.getsignal(signal.SIGTERM)
    sys.argv = ["sojourn", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        sys.argv = before
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
