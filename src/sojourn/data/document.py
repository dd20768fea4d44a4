"""What a source yields: a text or a chat, with the place it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Document:
    """Either `text` or `messages`. `where` is told to the user when something is wrong with it."""

    where: str
    text: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def size(self) -> int:
        """Bytes of its text or of its messages' contents."""
        return len(self.text.encode()) + sum(len(message.content.encode()) for message in self.messages)

    def fingerprint(self) -> int:
        """64 bits of its content: decides the split, stays the same when data is added or moved."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.text, *(f"{m.role}\0{m.content}" for m in self.messages)):
            digest.update(part.encode("utf-8", "surrogatepass"))
            digest.update(b"\1")
        return int.from_bytes(digest.digest(), "little")
