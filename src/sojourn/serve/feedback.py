"""What people think of answers, kept as two data sets that `sojourn prepare` reads.

`sft.jsonl`: liked, corrected and disliked answers as `messages`; those disliked have `label: false`, and `prepare`
leaves them out. `preferences.jsonl`: `chosen` and `rejected`, of corrections and of votes between two answers. Each row
has the id that the page gave it: who changes their mind replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.serve.errors import ApiError, bad_request
from sojourn.serve.schemas import AssistantMessage, Feedback
from sojourn.storage.files import CannotRead, NotValid, advice, append_json, read_bytes, write_text

SFT, PREFERENCES = "sft.jsonl", "preferences.jsonl"
_MOST_ROW_BYTES = 1 << 20
_MOST_FILE_BYTES = 64 << 20
_NEEDS = {
    "like": (True, False), "dislike": (False, True), "correction": (True, True), "preference": (True, True),
    "none": (False, False),
}  # fmt: skip


class FeedbackFolder:
    """Several servers may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._thread_lock = folder, threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--feedback {folder}: {error.strerror}; {advice(error)}, or start with: --feedback off"
            ) from None

    def save(self, given: Feedback, key: str) -> None:
        """Raises ApiError."""
        check(given)
        rows = to_rows(given, key)
        if any(len(json.dumps(row)) > _MOST_ROW_BYTES for row in rows.values()):
            raise ApiError(413, "this conversation is too long to be saved as feedback", code="feedback_too_large")
        try:
            with self._thread_lock, self._process_lock():
                for name in (SFT, PREFERENCES):
                    self._replace(self.folder / name, given.id, rows.get(name))
        except (OSError, CannotRead, NotValid) as error:
            reason = f"{error.strerror}; {advice(error)}" if isinstance(error, OSError) else str(error)
            raise ApiError(503, f"feedback cannot be saved: {reason}", code="feedback_not_saved") from None

    def _replace(self, path: Path, id: str, row: dict[str, Any] | None) -> None:
        """A kill leaves the file as it was, or as it is to be."""
        mark = f'{{"id": "{id}", '.encode()
        old = read_bytes(path) if path.exists() else b""
        if len(old) > _MOST_FILE_BYTES - _MOST_ROW_BYTES:
            raise ApiError(503, f"{path} is full; rename it to go on", code="feedback_full")
        if mark in old:
            kept = [line for line in old.splitlines(keepends=True) if not line.startswith(mark)]
            write_text(path, b"".join(kept).decode("utf-8", "replace"))
        if row is not None:
            append_json(path, row)
        if path.exists():
            path.chmod(0o600)

    @contextlib.contextmanager
    def _process_lock(self) -> Iterator[None]:
        with (self.folder / ".lock").open("ab") as file:
            if os.name == "posix":
                import fcntl

                with contextlib.suppress(OSError):  # a drive without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield


def check(given: Feedback) -> None:
    chosen, rejected = _NEEDS[given.kind]
    for name, needed in (("chosen", chosen), ("rejected", rejected)):
        answer: AssistantMessage | None = getattr(given, name)
        if needed != (answer is not None):
            raise bad_request(f"{name}: {'needed' if needed else 'not allowed'} for {given.kind!r}", name)
        if answer is not None and not (answer.content or answer.tool_calls):
            raise bad_request(f"{name}: an empty answer", name)
    if given.kind != "none" and not any(one.role == "user" for one in given.prompt):
        raise bad_request("prompt: without a message of the user", "prompt")
    if given.chosen is not None and given.chosen == given.rejected:
        raise bad_request("chosen and rejected are the same", "chosen")


def to_rows(given: Feedback, key: str) -> dict[str, dict[str, Any]]:
    """By file."""
    head = {"id": given.id, "kind": given.kind, "time": int(time.time()), "key": key, "model": given.model}
    tools = {"tools": [tool.model_dump(exclude_none=True) for tool in given.tools]} if given.tools else {}
    prompt = [one.model_dump(exclude_none=True) for one in given.prompt]
    chosen, rejected = (one and one.model_dump(exclude_none=True) for one in (given.chosen, given.rejected))
    rows: dict[str, dict[str, Any]] = {}
    if given.kind in ("like", "dislike", "correction"):
        # Earlier answers are context: nobody has judged them here.
        before = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in prompt]
        rows[SFT] = {**head, "messages": [*before, chosen or rejected], "label": chosen is not None, **tools}
    if given.kind in ("correction", "preference"):
        rows[PREFERENCES] = {**head, "prompt": prompt, "chosen": [chosen], "rejected": [rejected], **tools}
    return rows


def feedback_folder(given: str | None, local: bool) -> FeedbackFolder | None:
    """`given`: a folder, or `off`; by default a folder in SOJOURN_HOME, where only this machine reaches the server."""
    from sojourn.run.home import home

    if given == "off" or (given is None and not local):
        return None
    return FeedbackFolder(expand_user(given) if given else home() / "feedback")
