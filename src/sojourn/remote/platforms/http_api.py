"""JSON over HTTPS with a token: timeouts, retries that never repeat an order, errors of one line without the token."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sojourn.errors import UserError

if TYPE_CHECKING:
    import httpx

_LONGEST_WAIT = 120.0  # a platform that asks for more is shown to the user instead
_BUSY = {429}
_BROKEN = {500, 502, 503, 504, 520, 521, 522, 523, 524}
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


Sleep = Callable[[float], None]


class ApiError(UserError):
    """The platform refused. `status` is the HTTP status, `values` its JSON, where it sent any."""

    def __init__(self, message: str, status: int = 0, values: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.values = values


class OutcomeUnknown(ApiError):
    """The request may have been carried out: no answer came, or none that can be read."""


class Unreachable(ApiError):
    """The request never arrived."""


class HttpApi:
    """`headers` carry the token, and `token` is removed from every text that comes back."""

    def __init__(
        self,
        title: str,
        base_url: str,
        headers: Mapping[str, str],
        token: str,
        *,
        sleep: Sleep | None = None,
        timeout: float = 30.0,
        tries: int = 5,
    ) -> None:
        self.title = title
        self.base_url = _checked_url(title, base_url)
        self.sleep = time.sleep if sleep is None else sleep
        self._headers = dict(headers)
        self._token = token
        self._timeout = timeout
        self._tries = tries
        self._client: httpx.Client | None = None

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return self._send("GET", path, params, None, True)

    def query(self, path: str, body: Any) -> Any:
        """A question that this platform asks by POST; repeated like a GET."""
        return self._send("POST", path, None, body, True)

    def order(self, method: str, path: str, body: Any) -> Any:
        """Something that costs money when it is done twice: repeated only where it surely did not happen."""
        return self._send(method, path, None, body, False)

    def change(self, method: str, path: str, body: Any = None) -> Any:
        """A change that may be asked for twice (stop, release)."""
        return self._send(method, path, None, body, True)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def clean(self, text: object) -> str:
        """One printable line of what the platform says, without the token, of bounded length."""
        line = " ".join(str(text).split())
        line = line.replace(self._token, "***") if self._token else line
        return "".join(c if c.isprintable() else "?" for c in line)[:240]

    def _send(self, method: str, path: str, params: Mapping[str, str] | None, body: Any, repeatable: bool) -> Any:
        for left in reversed(range(self._tries)):
            retry_after: float | None = None
            try:
                return self._once(method, path, params, body)
            except Unreachable:
                if not left:
                    raise
            except _Busy as busy:
                retry_after = busy.retry_after
                if not left or (retry_after or 0) > _LONGEST_WAIT:
                    raise ApiError(self._busy(method, path, retry_after), busy.status, busy.values) from None
            except OutcomeUnknown:
                if not left or not repeatable:
                    raise
            self.sleep(self._delay(self._tries - 1 - left, retry_after))
        raise AssertionError("unreachable")

    def _delay(self, attempt: int, retry_after: float | None) -> float:
        """Jitter keeps several laptops of one account from asking in step."""
        spread = random.uniform(0.5, 1.5)  # noqa: S311 (not for secrets)
        if retry_after is not None:
            return retry_after + spread
        return float(min(15.0, 0.5 * 2**attempt) * spread)

    def _busy(self, method: str, path: str, retry_after: float | None) -> str:
        wait = f"; it asks to wait {retry_after:.0f} s" if retry_after else ""
        return f"{self.title}: too many requests ({method} {path}){wait}; try again later"

    def _once(self, method: str, path: str, params: Mapping[str, str] | None, body: Any) -> Any:
        import httpx

        if self._client is None:
            # Redirects are not followed: the token belongs to this address only.
            secure = self.base_url.startswith("https:")  # loopback has no certificates to load
            self._client = httpx.Client(
                base_url=self.base_url, headers=self._headers, timeout=self._timeout, follow_redirects=False,
                verify=secure,
            )  # fmt: skip
        what = f"{method} {path}"
        try:
            answer = self._client.request(method, path, params=params, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError) as error:
            raise Unreachable(f"{self.title}: {self._where()} cannot be reached ({self._reason(error)})") from None
        except httpx.TimeoutException:
            raise OutcomeUnknown(f"{self.title}: no answer to {what} within {self._timeout:g} s") from None
        except httpx.InvalidURL:
            raise UserError(f"{self.title}: {self.clean(path)!r} is not part of an address") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise OutcomeUnknown(f"{self.title}: the answer to {what} broke off ({self._reason(error)})") from None
        return self._read(what, answer)

    def _where(self) -> str:
        return urlsplit(self.base_url).netloc

    def _reason(self, error: Exception) -> str:
        return self.clean(error) or type(error).__name__

    def _read(self, what: str, answer: httpx.Response) -> Any:
        status, values = answer.status_code, _parsed(answer.text)
        if status in _BUSY:
            raise _Busy(_retry_after(answer.headers.get("Retry-After")), status, values)
        if status in _BROKEN:
            said = f": {self.clean(said_by(values))}" if said_by(values) else ""
            raise OutcomeUnknown(f"{self.title}: its server failed (HTTP {status} to {what}){said}", status, values)
        if answer.is_redirect:
            target = self.clean(urlsplit(answer.headers.get("Location", "")).netloc or "another page")
            why = "not followed, so that the token is not sent there"
            raise ApiError(f"{self.title}: {self._where()} redirects to {target}; {why}", status)
        if status >= 400:
            said = self.clean(said_by(values) or _title(answer.text) or answer.reason_phrase)
            raise ApiError(f"{self.title}: {said} (HTTP {status} to {what})", status, values)
        if status == 204 or not answer.content:
            return None
        if values is None:
            page = _title(answer.text)
            kind = f"a web page ({self.clean(page)})" if page else "not JSON"
            raise OutcomeUnknown(
                f"{self.title}: the answer to {what} is {kind}; is a proxy or a login page in the way?", status
            )
        return values


class _Busy(Exception):
    def __init__(self, retry_after: float | None, status: int, values: Any) -> None:
        self.retry_after, self.status, self.values = retry_after, status, values


def said_by(values: Any) -> str:
    """The human part of an error in JSON, under any of the names that these platforms use."""
    if not isinstance(values, dict):
        return ""
    inner = values.get("error")
    if isinstance(inner, dict):
        values, inner = inner, None
    words = [str(values[key]) for key in ("msg", "message", "detail", "suggestion") if values.get(key)]
    listed = values.get("errors")
    words += [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    return ". ".join(words) or (str(inner) if inner else "")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _title(text: str) -> str:
    found = re.search(r"<title[^>]*>([^<]{1,120})", text, re.IGNORECASE)
    return found[1].strip() if found else "no title" if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE) else ""


def _retry_after(header: str | None) -> float | None:
    """Seconds, or a date."""
    if header is None:
        return None
    try:
        return min(1e6, max(0.0, float(header)))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _checked_url(title: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return url.rstrip("/")
    raise UserError(f"{title}: {url!r} is no https address; the token is sent over nothing else")
