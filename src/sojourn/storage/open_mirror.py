"""`save.mirror` as typed by the user, to a mirror."""

from __future__ import annotations

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.storage.hub_mirror import HubMirror
from sojourn.storage.mirror import Mirror
from sojourn.storage.path_mirror import PathMirror


def open_mirror(text: str, run_name: str) -> Mirror:
    """A folder, or `hub:USER/REPOSITORY`. Nothing is created or requested yet."""
    if text.startswith("hub:"):
        return HubMirror(text.removeprefix("hub:"), run_name)
    if not text.strip():
        raise UserError("save.mirror: empty; write a folder such as /root/autodl-fs, or hub:USER/REPOSITORY")
    try:
        return PathMirror(expand_user(text).absolute() / run_name)
    except RuntimeError:
        raise UserError(f"save.mirror={text}: that user has no home folder; write the folder's full path") from None
