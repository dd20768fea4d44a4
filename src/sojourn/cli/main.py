"""The `sojourn` command: registers the verbs and turns a UserError into one line and an exit code."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

from sojourn import __version__
from sojourn.cli.bench import bench_app
from sojourn.cli.board import board
from sojourn.cli.bundle import bundle
from sojourn.cli.catalog import catalog_app
from sojourn.cli.chat import chat
from sojourn.cli.cloud import cloud_app
from sojourn.cli.config import config_app
from sojourn.cli.demo import demo
from sojourn.cli.doctor import doctor
from sojourn.cli.eval import evaluate
from sojourn.cli.export import export
from sojourn.cli.forward import forward
from sojourn.cli.generate import generate
from sojourn.cli.gpu import gpu
from sojourn.cli.host import host_app
from sojourn.cli.install import install
from sojourn.cli.launch import launch
from sojourn.cli.launch_line import launch_line
from sojourn.cli.logs import logs
from sojourn.cli.merge import merge
from sojourn.cli.move import move
from sojourn.cli.plan import plan
from sojourn.cli.prepare import prepare
from sojourn.cli.presets import presets_app
from sojourn.cli.pull import pull
from sojourn.cli.push import push
from sojourn.cli.quantize import quantize
from sojourn.cli.rehearse import rehearse
from sojourn.cli.release import release
from sojourn.cli.report import report
from sojourn.cli.runs import runs_app
from sojourn.cli.serve import serve
from sojourn.cli.shell import shell
from sojourn.cli.stop import stop
from sojourn.cli.train import train
from sojourn.cli.verify import verify
from sojourn.cli.verify_resume import verify_resume
from sojourn.errors import UserError
from sojourn.launch.stop_signals import STOP_SIGNALS
from sojourn.run.output import accept_any_encoding, lossy, open_missing_streams

_RUN_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}

_MACHINE_ERRORS = {
    getattr(errno, name, None)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "ENOTCONN", "ENODEV", "EMFILE", "ENFILE", "ENOMEM",
                 "EACCES", "EPERM", "EISDIR")
}  # fmt: skip

app = typer.Typer(
    name="sojourn",
    help="Train language models on rented GPUs: plan the cost, never lose a step, bring the model home.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"sojourn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def use_expandable_segments() -> None:
    """Reduces fragmentation of GPU memory, which otherwise wastes up to a fifth. Set before torch is imported; a
    user's own setting wins."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


def _exit_on_signal(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 wrong input, 3 stopped and resumable; `plan` also 4."""
    open_missing_streams()
    accept_any_encoding()
    for number in STOP_SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit_on_signal)  # clean up as after Ctrl-C
    use_expandable_segments()
    with lossy("stderr"):
        sys.exit(_run())


@functools.cache
def command_tree() -> Callable[..., Any]:
    """All commands with their options. To make it takes a tenth of a second."""
    return typer.main.get_command(app)


def _run() -> int:
    """Runs the command; returns its exit code. An error is one line on standard error."""
    try:
        code = command_tree()(prog_name="sojourn", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        print(f"sojourn: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one leaves at once, without a traceback
        print("sojourn: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) went away
        _discard_stdout()
        return 0
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:  # ours: keep the traceback
            raise
        from sojourn.storage.files import advice

        _discard_stdout()
        where = error.filename2 or error.filename or "a file"
        print(f"sojourn: {where}: {error.strerror}; {advice(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # ours: keep the traceback
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its help is printed already
            return 0
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "sojourn"
        message = error.format_message()
        print(message if "\n" in message else f"sojourn: {message} (see: {verb} --help)", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _discard_stdout() -> None:
    """Where it cannot be written: else Python tries again at its end, and changes the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app.command()(demo)
app.add_typer(presets_app, name="presets")
app.add_typer(config_app, name="config")
app.command()(doctor)
app.command(context_settings=_RUN_ARGS)(plan)
app.command(context_settings=_RUN_ARGS)(prepare)
app.command(context_settings=_RUN_ARGS)(rehearse)
app.command(context_settings=_RUN_ARGS)(train)
app.command(name="launch-line", context_settings=_RUN_ARGS)(launch_line)
app.command(name="verify-resume", context_settings=_RUN_ARGS)(verify_resume)
app.add_typer(catalog_app, name="catalog")
app.add_typer(bench_app, name="bench")
app.add_typer(runs_app, name="runs")
app.add_typer(host_app, name="host")
app.add_typer(cloud_app, name="cloud")
app.command(context_settings=_RUN_ARGS)(bundle)
app.command(context_settings=_RUN_ARGS)(launch)
for verb in (logs, gpu, pull, stop, move, forward, shell, release):
    app.command()(verb)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(board)
app.command()(report)
app.command()(verify)
app.command()(export)
app.command()(merge)
app.command()(push)
app.command()(quantize)
app.command(name="quantise", hidden=True)(quantize)
app.command()(install)

if __name__ == "__main__":
    main()
