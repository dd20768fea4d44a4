"""What a source yields: a text, a chat, or a pair of answers of which one is preferred; and where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` are {"name", "arguments"}; an assistant's turn that is not `trained` is only read."""

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Document:
    """Either `text` or `messages`; a preference pair has `messages` up to the chosen answer, and `rejected` likewise.

    `where` is told to the user when something is wrong with it.
    """

    where: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    rejected: tuple[Message, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    def contents(self) -> list[str]:
        """Its words, without roles and marks."""
        messages = (*self.messages, *self.rejected)
        return [self.text, *(m.content for m in messages)] if self.text else [m.content for m in messages]

    @property
    def size(self) -> int:
        """Bytes of its text or of its messages' contents."""
        return sum(len(part) if part.isascii() else len(part.encode()) for part in self.contents())

    def fingerprint(self) -> int:
        """64 bits of its content: decides the split, stays the same when data is added or moved."""
        parts = [self.text, *(f"{m.role}\0{m.content}" for m in self.messages)]
        parts += [f"rejected\0{m.role}\0{m.content}" for m in self.rejected]
        extras = [(m.tool_calls, m.reasoning, m.trained) for m in (*self.messages, *self.rejected)]
        if self.tools or any(extra != ((), "", True) for extra in extras):
            parts.append(json.dumps([self.tools, extras], sort_keys=True))
        whole = "\1".join(parts) + "\1"
        return int.from_bytes(hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
