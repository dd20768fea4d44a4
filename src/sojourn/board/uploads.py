"""Files that the page sends: written to a folder of their own, complete or absent."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

from anyio import to_thread
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sojourn.board.guard import MOST_UPLOAD
from sojourn.errors import RunFailed


async def receive_upload(request: Request, folder: Path, name: str) -> Path:
    """The path of the file. One of the same name and content is kept; another content gets a number."""
    plain = re.sub(r"[^\w.-]+", "-", Path(name.replace("\\", "/")).name).strip("-.")[:100]
    if not plain:
        raise HTTPException(400, "name: the file's name is needed")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{secrets.token_hex(8)}.part"
    size = 0
    try:
        with part.open("wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > MOST_UPLOAD:
                    raise HTTPException(413, f"the file is larger than {MOST_UPLOAD:,} bytes; name its path instead")
                await to_thread.run_sync(file.write, chunk)
        target = await to_thread.run_sync(_place, part, folder, plain)
    except OSError as error:
        raise RunFailed(f"{folder}: {error.strerror}; nothing was kept") from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload was broken off") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return target


def _place(part: Path, folder: Path, name: str) -> Path:
    from sojourn.storage.files import sha256

    target, number = folder / name, 2
    while target.exists():
        if target.stat().st_size == part.stat().st_size and sha256(target) == sha256(part):
            return target
        target = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
        number += 1
    part.replace(target)
    return target
