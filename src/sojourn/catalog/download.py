"""One small text file over HTTP, within a time limit, as UserErrors: catalogue rows, exchange rates, a config.json."""

from __future__ import annotations

from threading import Thread
from urllib.parse import urlsplit

from sojourn.config.messages import printable

_MOST_BYTES = 4 << 20


class DownloadFailed(Exception):
    """`status`: of the server's answer; None where there was none."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def host_of(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def download_text(url: str, headers: dict[str, str] | None = None, seconds: float = 10) -> str:
    """Raises DownloadFailed with the reason in words."""
    outcome: list[str | DownloadFailed] = []

    def request() -> None:
        try:
            outcome.append(_download(url, headers or {}, seconds))
        except DownloadFailed as error:
            outcome.append(error)
        except Exception as error:  # a proxy, resolver or certificate may raise anything
            outcome.append(DownloadFailed(printable(error, 80) or type(error).__name__))

    thread = Thread(target=request, daemon=True)  # DNS look-ups have no timeout
    thread.start()
    thread.join(2 * seconds)
    found = outcome[0] if outcome else DownloadFailed("no answer")
    if isinstance(found, DownloadFailed):
        raise found
    return found


def _download(url: str, headers: dict[str, str], seconds: float) -> str:
    import httpx

    with httpx.stream("GET", url, headers=headers, timeout=seconds, follow_redirects=True) as answer:
        if answer.status_code != 200:
            raise DownloadFailed(f"HTTP {answer.status_code}", answer.status_code)
        parts, size = [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MOST_BYTES:
                raise DownloadFailed(f"more than {_MOST_BYTES >> 20} MiB")
    try:
        return b"".join(parts).decode("utf-8")
    except UnicodeDecodeError:
        raise DownloadFailed("not UTF-8 text") from None
