"""Blocks of the KV cache: who uses them, and which hold the beginning of a text that may come again (prefix cache).

A block is `BLOCK` tokens of every layer. Full blocks are known by a hash of all tokens up to their end and of the
adapter, so equal beginnings share blocks. A block that nobody uses keeps its content until it is needed; the one unused
longest goes first, of one text the last. Block 0 is never given out: padding writes there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from sojourn.estimate import serving

BLOCK = serving.BLOCK  # tokens


def hash_block(previous: bytes, tokens: Sequence[int]) -> bytes:
    """`previous`: the hash of the block before, or what all of the text depends on (the adapter)."""
    content = b"".join(int(token).to_bytes(4, "little") for token in tokens)
    return hashlib.blake2b(previous + content, digest_size=16).digest()


class BlockPool:
    def __init__(self, blocks: int) -> None:
        self.total = blocks - 1
        self._unused: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, blocks))
        self._users = [0] * blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._unused)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Takes the blocks of the longest known beginning."""
        found = []
        for one in hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            self._take(block)
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """None where so many are not free."""
        if count > len(self._unused):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None
                if block not in self._hash_of:
                    self._unused.move_to_end(block, last=False)

    def remember(self, block: int, content: bytes) -> None:
        """The block is full, and may be found by its hash from now on."""
        if content not in self._block_of and block not in self._hash_of:
            self._hash_of[block], self._block_of[content] = content, block

    def forget_all(self) -> None:
        """When weights change, no content is valid any more."""
        self._hash_of.clear()
        self._block_of.clear()

    def _take(self, block: int) -> None:
        self._unused.pop(block, None)
        self._users[block] += 1

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
