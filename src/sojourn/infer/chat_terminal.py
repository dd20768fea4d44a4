"""`sojourn chat` in the terminal: input of one or several lines, commands, replies as they are generated."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.infer.chat import Chat, Reply
from sojourn.run.output import terminal_text

HELP = '''/reset              forget the conversation
/retry              another reply to your last message
/system [TEXT]      show or change the system message
/temp X             temperature: 0 is greedy decoding
/save FILE          append the conversation to a JSONL file, which prepare reads
/load FILE [N]      go on with the last conversation of such a file, or the Nth
/help, /exit        (or Ctrl-D)
Several lines: between lines of """, or with \\ at the end of each. Ctrl-C stops a reply.'''
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_BLOCK = '"""'


class ChatTerminal:
    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset, "retry": self._retry, "system": self._system, "temp": self._temp, "save": self._save,
            "load": self._load, "help": lambda _: print(HELP),
        }  # fmt: skip

    def run(self) -> None:
        """Until /exit or the end of the input."""
        accept_any_input()
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 (history and editing in input())
        print(f"{self._chat.generator.loaded.path} · /help lists commands, /exit quits")
        interrupted = False
        while True:
            try:
                text = read_message()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return
                interrupted = True
                print("(Ctrl-C again or /exit quits)")
                continue
            interrupted = False
            if text in ("/exit", "/quit"):
                return
            try:
                self._take(text)
            except UserError as error:
                print(f"({error})")

    def _take(self, text: str) -> None:
        match = _COMMAND.fullmatch(text)
        if match is None:
            if text:
                self._show(lambda *given: self._chat.say(text, *given))
        elif match[1] in self._commands:
            self._commands[match[1]]((match[2] or "").strip())
        else:
            print(f"(no command /{match[1]}{did_you_mean(match[1], [*self._commands, 'exit'])}; /help lists them)")

    def _show(self, answer: Callable[..., Reply]) -> None:
        """A reply, printed as it is generated. Ctrl-C ends it; another one ends it at once."""
        print("model: ", end="", flush=True)
        with _stoppable() as stopped:
            try:
                reply = answer(lambda piece: print(terminal_text(piece), end="", flush=True), stopped.is_set)
            except KeyboardInterrupt:
                print("\n(stopped)")
                return
        print()
        if stopped.is_set():
            print("(stopped)")
        if reply.left_out:
            print(f"({reply.left_out} oldest turns no longer fit the model's context and were left out)")
        cut = self._chat.generator.describe_cut(reply.completion, self._chat.params)
        if cut is not None and not stopped.is_set():
            print(f"({cut})")

    def _reset(self, _: str) -> None:
        self._chat.reset()
        print("(a new conversation)")

    def _retry(self, _: str) -> None:
        if not self._chat.params.temperature:
            print("(temperature 0 gives the same reply again; /temp 0.8 samples)")
        self._show(self._chat.retry)

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text
        print(f"(system message: {self._chat.system})" if self._chat.system else "(no system message)")

    def _temp(self, text: str) -> None:
        try:
            self._chat.params = replace(self._chat.params, temperature=float(text))
        except ValueError:
            raise UserError("/temp needs a number, such as 0.7") from None
        print(f"(temperature {self._chat.params.temperature:g})")

    def _save(self, text: str) -> None:
        print(f"(saved to {self._chat.save(_path(text, '/save FILE'))})")

    def _load(self, text: str) -> None:
        match = re.fullmatch(r"(.*\S)\s+([0-9]{1,9})", text)
        name, number = (match[1], int(match[2])) if match else (text, None)
        self._chat.load(_path(name, "/load FILE"), number)
        print(f"({len(self._chat.turns)} turns)")
        for turn in self._chat.turns[-2:]:
            print(f"{'you' if turn.role == 'user' else 'model'}: {terminal_text(turn.content)}")


def _path(text: str, usage: str) -> Path:
    if not text:
        raise UserError(f"{usage}: name a file")
    return expand_user(text).absolute()


def accept_any_input() -> None:
    """Bytes that the terminal's encoding does not have are no error."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


def read_message() -> str:
    """A line; lines that end with a backslash and the one after them; or all lines between two lines of \"\"\"."""
    line = _read_line("you: ")
    if line.strip().startswith(_BLOCK):
        return _read_block(line.strip()[len(_BLOCK) :])
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line("...  "))
    return "\n".join(lines).strip()


def _read_block(first: str) -> str:
    lines = [first] if first else []
    while not (lines and lines[-1].rstrip().endswith(_BLOCK)):
        lines.append(_read_line("...  "))
    lines[-1] = lines[-1].rstrip()[: -len(_BLOCK)]
    return "\n".join(lines).strip("\n")


def _read_line(prompt: str) -> str:
    """Text in another encoding than the terminal's is read as UTF-8 where it is that, as in a locale of C."""
    text = input(prompt)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode(sys.stdin.encoding or "utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """The first Ctrl-C in the block sets the event; the next one interrupts."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def on_interrupt(number: int, frame: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
