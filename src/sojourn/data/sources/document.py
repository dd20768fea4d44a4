"""What a source yields: a text, a chat, or a preference pair; and where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` are {"name", "arguments"}; an assistant turn with `trained` false is only context."""

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Document:
    """Either `text` or `messages`; a preference pair has `messages` up to the chosen answer, and `rejected` likewise.

    `where` (file and line) is for messages.
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
        """Its text or message contents, without roles."""
        messages = (*self.messages, *self.rejected)
        return [self.text, *(m.content for m in messages)] if self.text else [m.content for m in messages]

    @property
    def size(self) -> int:
        """Bytes of its text or of its messages' contents."""
        return sum(len(part) if part.isascii() else len(part.encode()) for part in self.contents())

    def fingerprint(self) -> int:
        """A 64-bit hash of the content: it decides the split, and does not change when data is added or moved."""
        parts = [self.text, *(f"{m.role}\0{m.content}" for m in self.messages)]
        parts += [f"rejected\0{m.role}\0{m.content}" for m in self.rejected]
        extras = [(m.tool_calls, m.reasoning, m.trained) for m in (*self.messages, *self.rejected)]
        if self.tools or any(extra != ((), "", True) for extra in extras):
            parts.append(json.dumps([self.tools, extras], sort_keys=True))
        whole = "\1".join(parts) + "\1"
        return int.from_bytes(hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
