"""A conversation with a model: turns, replies, and the JSONL file in which `prepare` can read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sojourn.data.sources.document import Message
from sojourn.data.sources.turns import read_turns
from sojourn.data.sources.values import BadRecord
from sojourn.errors import UserError
from sojourn.infer.generate import Completion, Generator, Prompt, draw_seed
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams
from sojourn.storage.files import NotValid, advice, parse_json, read_bytes, write_text


@dataclass(frozen=True)
class Reply:
    """`left_out`: how many of the oldest turns no longer fit the context."""

    completion: Completion
    left_out: int


class Chat:
    """`turns` are without the system message. What a prompt has in common with earlier ones is in the engine's prefix
    cache."""

    def __init__(self, generator: Generator, params: SamplingParams, system: str = "") -> None:
        self.generator, self._encoder = generator, PromptEncoder(generator.loaded.tokenizer)
        self.params = replace(params, seed=draw_seed() if params.seed is None else params.seed)
        self.system, self.turns = system, list[Message]()
        self._attempt = 0
        self._saved: tuple[Path, str] | None = None  # where this conversation was last saved, and as which line

    def reset(self) -> None:
        self.turns, self._saved = [], None

    def say(self, text: str, on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        """The reply to a message. Raises UserError where the model cannot take it; nothing has changed then."""
        self._attempt = 0
        return self._reply([*self.turns, Message("user", text)], on_text, should_stop)

    def retry(self, on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        """Another reply to the last message."""
        asked = self.turns[:-1] if self.turns and self.turns[-1].role == "assistant" else self.turns
        if not asked:
            raise UserError("nothing to answer yet")
        self._attempt += 1
        return self._reply(asked, on_text, should_stop)

    def _reply(self, turns: list[Message], on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        ids, left_out = self._fit(turns)
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        prompt = Prompt(ids, len(turns), self._attempt)
        try:
            completion = self.generator.stream(prompt, self.params, write, should_stop)
        except KeyboardInterrupt:
            self.turns = [*turns, Message("assistant", "".join(pieces))]
            raise
        self.turns = [*turns, Message("assistant", completion.text)]
        return Reply(completion, left_out)

    def _fit(self, turns: list[Message]) -> tuple[list[int], int]:
        """The prompt's ids, with room for a reply; the oldest turns are left out where they do not fit."""
        context = self.generator.context
        most = context - min(self.params.max_tokens, context // 4)
        before = [Message("system", self.system)] if self.system else []
        starts = [at for at, turn in enumerate(turns) if turn.role == "user"] or [0]
        try:
            for start in starts:
                ids = self._encoder.chat([*before, *turns[start:]])
                if len(ids) <= most or start == starts[-1]:
                    break
        except BadRecord as error:
            raise UserError(str(error)) from None
        reason = self.generator.check(ids)
        if reason is not None:
            raise UserError(f"this message does not fit: {reason}")
        return ids, start

    def save(self, path: Path) -> str:
        """Appends the conversation to a JSONL file, or replaces its line there; returns what to tell the user."""
        turns = self.turns if self.turns and self.turns[-1].role == "assistant" else self.turns[:-1]
        if not turns:
            raise UserError("nothing to save yet")
        messages = [*([Message("system", self.system)] if self.system else []), *turns]
        line = json.dumps({"messages": [{"role": m.role, "content": m.content} for m in messages]}, ensure_ascii=False)
        line = line.encode(errors="backslashreplace").decode() + "\n"
        text = _read(path) if path.exists() else ""
        if self._saved is not None and self._saved[0] == path and text.endswith(self._saved[1]):
            text = text[: -len(self._saved[1])]
        try:
            write_text(path, text + ("\n" if text and not text.endswith("\n") else "") + line)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; {advice(error)}") from None
        self._saved = (path, line)
        return f"{path}: {len(turns)} turns; conversations in it: {text.count(chr(10)) + 1}"

    def load(self, path: Path, number: int | None = None) -> None:
        """The last conversation of a JSONL file, or the one with this number, from 1."""
        lines = [line for line in _read(path).split("\n") if line.strip()]
        if not lines or not 1 <= (number or 1) <= len(lines):
            raise UserError(f"{path}: it has {len(lines)} conversations")
        try:
            record = parse_json(lines[(number or len(lines)) - 1].encode())
            turns = read_turns(record.get("messages") if isinstance(record, dict) else None, "messages")
        except (NotValid, BadRecord) as error:
            raise UserError(f"{path}: no conversation there: {error}") from None
        self.system = turns[0].content if turns[0].role == "system" else ""
        self.turns, self._saved = turns[bool(self.system) :], None


def _read(path: Path) -> str:
    try:
        text = read_bytes(path).decode("utf-8-sig")
        if text.strip():
            parse_json(text.rstrip().rsplit("\n", 1)[-1].encode())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError:
        raise UserError(f"{path}: not a JSONL file of conversations; choose another name") from None
    return text
