"""A choice as chat APIs see it: text, tool calls, and why it ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from sojourn.infer.engine.request import Token
from sojourn.serve.formats import ToolUse
from sojourn.serve.generation import Delta, Generation
from sojourn.serve.tools import Call, ToolParser


@dataclass(frozen=True)
class Piece:
    """New parts of one choice. `finish_reason`: stop, length or tool_calls."""

    index: int
    text: str = ""
    calls: tuple[Call, ...] = ()
    first_call: int = 0  # the number of the first of `calls` in its choice
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


class AnswerReader:
    def __init__(self, index: int, tools: ToolUse) -> None:
        self._index, self._several, self._calls, self.ended = index, tools.several, 0, False
        self._parser = None if tools.form is None else ToolParser(tools.form)

    def add(self, delta: Delta) -> Piece:
        if self._parser is None:
            self.ended = delta.finish_reason is not None
            return Piece(self._index, delta.text, (), 0, delta.tokens, delta.finish_reason)
        parts = self._parser.add(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        calls = tuple(part for part in parts if isinstance(part, Call))
        if calls and not self._several:
            calls = calls[: 1 - self._calls]
        first, self._calls = self._calls, self._calls + len(calls)
        finish: str | None = delta.finish_reason
        if self._calls and (finish == "stop" or not self._several):
            finish = "tool_calls"
        self.ended = finish is not None
        text = "".join(part for part in parts if isinstance(part, str))
        return Piece(self._index, text, calls, first, delta.tokens, finish)


async def read_answers(generation: Generation, choices: int, tools: ToolUse) -> AsyncGenerator[Piece, None]:
    """Of all choices as they come. It ends when each has its finish_reason."""
    readers = [AnswerReader(index, tools) for index in range(choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            reader = readers[delta.index]
            if reader.ended:  # it has its only call; the rest of what the model writes is not wanted
                continue
            yield reader.add(delta)
            if all(one.ended for one in readers):
                return


@dataclass
class Answer:
    """A whole choice."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.calls += piece.calls
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason


async def whole_answers(generation: Generation, choices: int, tools: ToolUse) -> list[Answer]:
    answers = [Answer() for _ in range(choices)]
    async with aclosing(read_answers(generation, choices, tools)) as pieces:
        async for piece in pieces:
            answers[piece.index].add(piece)
    return answers
