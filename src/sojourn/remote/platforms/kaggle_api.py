"""Kaggle's API as its own client speaks it: private data sets, script kernels, logs, outputs, the week's GPU hours."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.remote.platforms.http_api import ApiError, HttpApi, OutcomeUnknown
from sojourn.storage.files import read_json_object

URL = "https://api.kaggle.com"
_HELP = "make one at https://www.kaggle.com/settings and set KAGGLE_API_TOKEN (or KAGGLE_USERNAME and KAGGLE_KEY)"
_KERNELS, _DATASETS, _BLOBS = "kernels.KernelsApiService", "datasets.DatasetApiService", "blobs.BlobApiService"
_UPLOAD_TRIES = 8
_LOG_TRIES = 5
_BLOCK = 1 << 20


@dataclass(frozen=True)
class KernelStatus:
    """`state`: queued, running, complete, error or cancelled."""

    state: str
    message: str = ""


@dataclass(frozen=True)
class Quota:
    """Hours of GPU a week."""

    used: float
    allowed: float


@dataclass(frozen=True)
class OutputFile:
    name: str
    url: str


def find_credentials() -> tuple[str | None, str]:
    """The user's name, None where the token has to tell it, and the token or key; from where Kaggle's own client looks,
    too."""
    from sojourn.remote import secrets

    token = secrets.get("kaggle_api_token")
    if token:
        return None, token.strip()
    user, key = os.environ.get("KAGGLE_USERNAME", "").strip(), os.environ.get("KAGGLE_KEY", "").strip()
    if user and key:
        return user, secrets.remember(key)
    folder = expand_user("~/.kaggle")
    for name in ("access_token", "access_token.txt"):
        if (folder / name).is_file():
            return None, secrets.remember((folder / name).read_text(encoding="utf-8").strip())
    kept = read_json_object(folder / "kaggle.json")
    if kept.get("username") and kept.get("key"):
        return str(kept["username"]), secrets.remember(str(kept["key"]))
    raise UserError(f"kaggle: no token; {_HELP}")


class KaggleApi:
    """`user` is the account's name, which is part of every address."""

    def __init__(
        self,
        user: str | None,
        token: str,
        base_url: str | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        timeout: float = 60.0,
    ) -> None:
        plain = f"Basic {base64.b64encode(f'{user}:{token}'.encode()).decode()}"
        headers = {"Authorization": f"Bearer {token}" if user is None else plain, "User-Agent": "sojourn"}
        address = base_url or os.environ.get("SOJOURN_KAGGLE_URL") or URL
        self._http = HttpApi("Kaggle", address, headers, token, sleep=sleep, timeout=timeout)
        self._sleep, self._timeout, self._headers = sleep, timeout, headers
        self.user = user or self._name_of(token)

    def dataset_state(self, slug: str) -> str | None:
        """ready, failed or another word for under way; None where there is no such data set."""
        try:
            found = self._call(_DATASETS, "GetDatasetStatus", {"ownerSlug": self.user, "datasetSlug": slug})
        except ApiError as error:
            if error.status in (403, 404):  # Kaggle does not say which data sets of others there are
                return None
            raise
        return str(found.get("status", "")).lower()

    def create_dataset(self, slug: str, title: str, files: list[Path], show: Callable[[int, int], None]) -> None:
        """Private. A data set that is there already gets a new version."""
        tokens = [{"token": self.upload(file, show)} for file in files]
        if self.dataset_state(slug) is None:
            body: dict[str, Any] = {
                "title": title, "slug": slug, "ownerSlug": self.user, "licenseName": "unknown", "isPrivate": True,
                "files": tokens,
            }  # fmt: skip
            answer = self._call(_DATASETS, "CreateDataset", body)
        else:
            version = {"versionNotes": "sojourn", "deleteOldVersions": True, "files": tokens}
            body = {"ownerSlug": self.user, "datasetSlug": slug, "body": version}
            answer = self._call(_DATASETS, "CreateDatasetVersion", body)
        if answer.get("error") or str(answer.get("status", "ok")).lower() == "error":
            raise RunFailed(f"Kaggle: data set {slug}: {self._http.clean(answer.get('error') or 'refused')}")

    def upload(self, file: Path, show: Callable[[int, int], None] = lambda done, size: None) -> str:
        """A token for the uploaded file. Continues after a broken connection where the server has got to."""
        size = file.stat().st_size
        request = {
            "type": "DATASET", "name": file.name, "contentLength": size,
            "lastModifiedEpochSeconds": int(file.stat().st_mtime),
        }  # fmt: skip
        started = self._call(_BLOBS, "StartBlobUpload", request)
        token, url = str(started.get("token", "")), str(started.get("createUrl", ""))
        if not token or not url:
            raise OutcomeUnknown("Kaggle: StartBlobUpload answered without a token and an address")
        for attempt in range(_UPLOAD_TRIES):
            at = 0 if attempt == 0 else self._uploaded(url, size)
            if at == size or self._put(file, url, at, size, show):
                return token
            self._sleep(min(30.0, 0.5 * 2**attempt))
        raise RunFailed(f"Kaggle: the upload of {file.name} broke off {_UPLOAD_TRIES} times; try again later")

    def push_kernel(self, metadata: dict[str, Any], code: str, seconds: int) -> int:
        """Pushes one script, which starts at once; its version."""
        slug = str(metadata["id"])
        body = {
            "slug": slug, "newTitle": metadata["title"], "text": code, "language": metadata["language"],
            "kernelType": metadata["kernel_type"], "isPrivate": metadata["is_private"],
            "enableGpu": metadata["enable_gpu"], "enableTpu": False, "enableInternet": metadata["enable_internet"],
            "datasetDataSources": metadata["dataset_sources"], "kernelDataSources": metadata["kernel_sources"],
            "machineShape": metadata["machine_shape"], "sessionTimeoutSeconds": seconds,
        }  # fmt: skip
        body = {key: value for key, value in body.items() if value != []}  # as Kaggle's own client does
        answer = self._call(_KERNELS, "SaveKernel", body, order=True)
        if answer.get("error"):
            raise RunFailed(f"Kaggle: {slug} was not started: {self._http.clean(answer['error'])}")
        wrong = [*(answer.get("invalidDatasetSources") or []), *(answer.get("invalidKernelSources") or [])]
        if wrong:
            raise RunFailed(f"Kaggle: {slug}: it cannot read {', '.join(map(str, wrong))}")
        return int(answer.get("versionNumber") or 1)

    def kernel_status(self, slug: str) -> KernelStatus:
        answer = self._call(_KERNELS, "GetKernelSessionStatus", {"userName": self.user, "kernelSlug": slug})
        word = str(answer.get("status", "")).lower()
        state = {"new_script": "queued", "cancel_requested": "cancelled", "cancel_acknowledged": "cancelled"}
        return KernelStatus(state.get(word, word), self._http.clean(answer.get("failureMessage") or ""))

    def outputs(self, slug: str) -> Iterator[OutputFile]:
        page = ""
        while True:
            answer = self._output_page(slug, page)
            for file in answer.get("files") or []:
                yield OutputFile(str(file.get("fileName", "")), str(file.get("url", "")))
            page = str(answer.get("nextPageToken") or "")
            if not page:
                return

    def log(self, slug: str) -> str:
        """All that the session printed so far, or in the end."""
        return "".join(_texts(str(self._output_page(slug, "").get("log") or "")))

    def follow_log(self, slug: str) -> Iterator[str]:
        """Pieces of the log as they come, until its end. After a broken connection the server starts over: what was
        seen is skipped."""
        seen, failures = 0, 0
        while True:
            try:
                for number, text in enumerate(self._log_events(slug)):
                    if number >= seen:
                        seen, failures = number + 1, 0
                        yield text
                return
            except OutcomeUnknown:
                failures += 1
                if failures >= _LOG_TRIES:
                    raise
                self._sleep(1.0)

    def quota(self) -> Quota | None:
        """None where the account or the API does not say."""
        try:
            answer = self._call(_KERNELS, "GetAcceleratorQuotaStatistics", {})
        except ApiError as error:
            if error.status in (400, 403, 404, 501):
                return None
            raise
        found = answer.get("gpuQuota")
        if not isinstance(found, dict) or not found.get("totalTimeAllowed"):
            return None
        return Quota(
            _hours(found.get("timeUsed")) + _hours(found.get("timeReserved")), _hours(found["totalTimeAllowed"])
        )

    def _name_of(self, token: str) -> str:
        answer = self._call("security.OAuthService", "IntrospectToken", {"token": token})
        if not answer.get("active") or not answer.get("username"):
            raise UserError(f"Kaggle: the token is not valid or has expired; {_HELP}")
        return str(answer["username"])

    def _output_page(self, slug: str, page: str) -> dict[str, Any]:
        body: dict[str, Any] = {"userName": self.user, "kernelSlug": slug, "pageSize": 200}
        return self._call(_KERNELS, "ListKernelSessionOutput", {**body, **({"pageToken": page} if page else {})})

    def _call(self, service: str, name: str, body: dict[str, Any], order: bool = False) -> dict[str, Any]:
        path = f"/v1/{service}/{name}"
        try:
            answer = self._http.order("POST", path, body) if order else self._http.query(path, body)
        except ApiError as error:
            if error.status == 401:
                raise ApiError(f"Kaggle: the token was refused; {_HELP}", 401) from None
            raise
        answer = answer if isinstance(answer, dict) else {}
        code = answer.get("code")
        if isinstance(code, int) and code >= 400:
            message = self._http.clean(answer.get("message") or "refused")
            raise ApiError(
                f"Kaggle: {message}" if code != 401 else f"Kaggle: the token was refused; {_HELP}", code, answer
            )
        return answer

    def _put(self, file: Path, url: str, at: int, size: int, show: Callable[[int, int], None]) -> bool:
        """Whether all of the file has arrived. The address is a secret of its own and gets no token."""
        import httpx

        headers = {"Content-Length": str(size - at)}
        if at:
            headers["Content-Range"] = f"bytes {at}-{size - 1}/{size}"
        try:
            answer = httpx.put(url, content=_blocks(file, at, size, show), headers=headers, timeout=self._timeout)
        except httpx.HTTPError:
            return False
        if answer.status_code in (200, 201):
            return True
        if answer.status_code in (308, 429) or answer.status_code >= 500:
            return False
        raise RunFailed(f"Kaggle: the upload of {file.name} was refused (HTTP {answer.status_code})")

    def _uploaded(self, url: str, size: int) -> int:
        """Bytes that have arrived."""
        import httpx

        try:
            answer = httpx.put(url, headers={"Content-Length": "0", "Content-Range": f"bytes */{size}"}, timeout=30.0)
        except httpx.HTTPError:
            return 0
        if answer.status_code in (200, 201):
            return size
        last = answer.headers.get("Range", "").rpartition("-")[2]
        return int(last) + 1 if answer.status_code == 308 and last.isdigit() else 0

    def _log_events(self, slug: str) -> Iterator[str]:
        import httpx

        address = f"{self._http.base_url}/v1/kernels/logs/stream/{self.user}/{slug}"
        headers = {**self._headers, "Accept": "text/event-stream, */*"}
        try:
            with httpx.stream(
                "GET", address, headers=headers, timeout=httpx.Timeout(self._timeout, read=300)
            ) as answer:
                if answer.status_code >= 500 or answer.status_code == 429:
                    raise OutcomeUnknown(f"Kaggle: its server failed (HTTP {answer.status_code})", answer.status_code)
                if answer.status_code >= 400:
                    raise ApiError(f"Kaggle: no log of {slug} (HTTP {answer.status_code})", answer.status_code)
                if not answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    yield from _texts(answer.read().decode(errors="replace"))
                    return
                for line in answer.iter_lines():
                    payload = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if payload == "END_OF_LOG":
                        return
                    if payload:
                        yield from _texts(payload)
        except httpx.HTTPError as error:
            raise OutcomeUnknown(f"Kaggle: the log broke off ({type(error).__name__})") from None


def _blocks(file: Path, at: int, size: int, show: Callable[[int, int], None]) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(at)
        while block := stream.read(_BLOCK):
            yield block
            at += len(block)
            show(at, size)


def _texts(log: str) -> list[str]:
    """A log is JSON: one or a list of {"stream_name", "time", "data"}; anything else is text."""
    try:
        found = json.loads(log)
    except ValueError:
        return [f"{line}\n" for line in log.splitlines()]
    events = found if isinstance(found, list) else [found]
    return [str(event.get("data", "")) for event in events if isinstance(event, dict)]


def _hours(value: Any) -> float:
    """`151.5s` as hours."""
    try:
        return float(str(value or 0).rstrip("s")) / 3600
    except ValueError:
        return 0.0
