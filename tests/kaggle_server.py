"""A local server that behaves as Kaggle's API does, by its own client's source: data sets, kernels, uploads, outputs.

Kernels do not run here: a test says what a session printed and left. `faults` are answers to give before the real one.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER, KEY, TOKEN = "ada", "0123456789abcdef0123456789abcdef", "KGAT_" + "0123456789abcdef" * 2


@dataclass
class Kernel:
    request: dict[str, Any]
    versions: int = 1
    status: str = "QUEUED"
    failure: str = ""
    log: list[str] = field(default_factory=list)
    outputs: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Kaggle:
    url: str = ""
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    blobs: dict[str, bytearray] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    faults: dict[str, list[Any]] = field(default_factory=dict)  # by method name: a status, "hang" or "break"
    dataset_polls: int = 2  # before a data set is ready
    quota: tuple[float, float] | None = (3.0, 30.0)
    page: int = 2  # outputs a page

    def bodies(self, method: str) -> list[dict[str, Any]]:
        return [body for name, body in self.requests if name == method]


@contextmanager
def kaggle_server(port: int = 0) -> Iterator[Kaggle]:
    state = Kaggle()

    class Handler(_Handler):
        kaggle = state

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message


class _Handler(BaseHTTPRequestHandler):
    kaggle: Kaggle
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        method = self.path.rpartition("/")[2]
        if self._fault(method):
            return
        try:
            self._check_token()
            self.kaggle.requests.append((method, body))
            answer = getattr(self, method)(body)
            self._json(200, answer)
        except _Refused as refused:
            self._json(refused.code, {"code": refused.code, "message": refused.message})

    def do_PUT(self) -> None:
        """Google's resumable upload."""
        token = self.path.rpartition("/")[2]
        blob, size = self.kaggle.blobs[token], self.kaggle.sizes[token]
        length, given = int(self.headers.get("Content-Length") or 0), self.headers.get("Content-Range", "")
        asked = given.startswith("bytes */")
        fault = None if asked else self._next_fault("upload")
        data = self.rfile.read(length if fault is None else length // 2)
        if not asked:
            start = int(match[1]) if (match := re.match(r"bytes (\d+)-", given)) else 0
            assert start == len(blob) or start == 0
            blob[start:] = data
        if fault == "break":
            self.close_connection = True
            self.connection.close()
        elif fault is not None:
            self._json(fault, {})
        elif len(blob) == size:
            self._json(200, {})
        else:
            range_ = {"Range": f"bytes=0-{len(blob) - 1}"} if blob else {}
            self._json(308, {}, range_)

    def do_GET(self) -> None:
        if self.path.startswith("/out/"):
            self._output()
            return
        slug = self.path.rpartition("/")[2]
        if self._fault("logs"):
            return
        kernel = self.kaggle.kernels[slug]
        events = [{"stream_name": "stdout", "time": i, "data": text} for i, text in enumerate(kernel.log)]
        if kernel.status in ("COMPLETE", "ERROR"):
            self._json(200, events)
            return
        fault = self._next_fault("stream")
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        lines = lines[: len(lines) // 2] if fault else [*lines, "data: END_OF_LOG\n\n"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len("".join(lines)) + (10 if fault else 0)))
        self.end_headers()
        self.wfile.write("".join(lines).encode())
        self.close_connection = True

    def IntrospectToken(self, body: dict[str, Any]) -> Any:  # noqa: N802
        return {"active": body["token"] == TOKEN, "username": USER if body["token"] == TOKEN else ""}

    def GetDatasetStatus(self, body: dict[str, Any]) -> Any:  # noqa: N802
        found = self.kaggle.datasets.get(body["datasetSlug"])
        if found is None:
            raise _Refused(403, "Permission 'datasets.get' was denied")
        if found.get("failed"):
            return {"status": "FAILED"}
        found["polls"] += 1
        return {"status": "READY" if found["polls"] > self.kaggle.dataset_polls else "BLOBS_RECEIVED"}

    def CreateDataset(self, body: dict[str, Any]) -> Any:  # noqa: N802
        assert 6 <= len(body["slug"]) <= 50 and 6 <= len(body["title"]) <= 50
        assert body["isPrivate"] is True
        self.kaggle.datasets[body["slug"]] = {"files": body["files"], "polls": 0, "versions": 1}
        return {"status": "ok", "ref": f"{USER}/{body['slug']}", "url": ""}

    def CreateDatasetVersion(self, body: dict[str, Any]) -> Any:  # noqa: N802
        found = self.kaggle.datasets[body["datasetSlug"]]
        found.update(files=body["body"]["files"], polls=0, versions=found["versions"] + 1)
        return {"status": "ok"}

    def StartBlobUpload(self, body: dict[str, Any]) -> Any:  # noqa: N802
        assert body["type"] == "DATASET"
        token = f"blob{len(self.kaggle.blobs)}"
        self.kaggle.blobs[token], self.kaggle.sizes[token] = bytearray(), body["contentLength"]
        return {"token": token, "createUrl": f"{self.kaggle.url}/upload/{token}"}

    def SaveKernel(self, body: dict[str, Any]) -> Any:  # noqa: N802
        owner, _, slug = body["slug"].partition("/")
        assert owner == USER and body["newTitle"] == slug and len(slug) <= 50
        if self.kaggle.quota and self.kaggle.quota[0] >= self.kaggle.quota[1]:
            return {"error": "Maximum weekly GPU quota of 30.00 hours reached."}
        known = set(self.kaggle.datasets)
        wrong = [one for one in body.get("datasetDataSources", []) if one.partition("/")[2] not in known]
        lost = [one for one in body.get("kernelDataSources", []) if one.partition("/")[2] not in self.kaggle.kernels]
        if slug in self.kaggle.kernels:
            self.kaggle.kernels[slug].versions += 1
        else:
            self.kaggle.kernels[slug] = Kernel(body)
        return {
            "ref": f"/code/{body['slug']}", "url": f"https://www.kaggle.com/code/{body['slug']}",
            "versionNumber": self.kaggle.kernels[slug].versions, "invalidDatasetSources": wrong,
            "invalidKernelSources": lost,
        }  # fmt: skip

    def GetKernelSessionStatus(self, body: dict[str, Any]) -> Any:  # noqa: N802
        kernel = self._kernel(body)
        return {"status": kernel.status, **({"failureMessage": kernel.failure} if kernel.failure else {})}

    def ListKernelSessionOutput(self, body: dict[str, Any]) -> Any:  # noqa: N802
        kernel = self._kernel(body)
        names, at = sorted(kernel.outputs), int(body.get("pageToken") or 0)
        page = names[at : at + self.kaggle.page]
        slug = body["kernelSlug"]
        files = [{"fileName": name, "url": f"{self.kaggle.url}/out/{slug}/{name}"} for name in page]
        more = {"nextPageToken": str(at + self.kaggle.page)} if at + self.kaggle.page < len(names) else {}
        log = json.dumps([{"stream_name": "stdout", "time": 0, "data": text} for text in kernel.log])
        return {"files": files, "log": log, **more}

    def GetAcceleratorQuotaStatistics(self, _: dict[str, Any]) -> Any:  # noqa: N802
        if self.kaggle.quota is None:
            raise _Refused(404, "Not found")
        used, allowed = self.kaggle.quota
        return {
            "gpuQuota": {"timeUsed": f"{used * 3600}s", "timeReserved": "0s", "totalTimeAllowed": f"{allowed * 3600}s"}
        }

    def _kernel(self, body: dict[str, Any]) -> Kernel:
        found = self.kaggle.kernels.get(body["kernelSlug"])
        if found is None:
            raise _Refused(404, "Not found")
        return found

    def _output(self) -> None:
        _, _, slug, name = self.path.split("/", 3)
        data = self.kaggle.kernels[slug].outputs[name]
        at = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        fault = self._next_fault("download")
        self.send_response(206 if at else 200)
        self.send_header("Content-Length", str(len(data) - at))
        self.end_headers()
        self.wfile.write(data[at : at + (len(data) - at) // 2] if fault else data[at:])
        if fault:
            self.close_connection = True
            self.connection.close()

    def _check_token(self) -> None:
        basic = "Basic " + base64.b64encode(f"{USER}:{KEY}".encode()).decode()
        introspects = self.path.endswith("IntrospectToken")
        if self.headers.get("Authorization") not in (basic, f"Bearer {TOKEN}") and not introspects:
            raise _Refused(401, "Unauthenticated")

    def _next_fault(self, method: str) -> Any:
        waiting = self.kaggle.faults.get(method)
        return waiting.pop(0) if waiting else None

    def _fault(self, method: str) -> bool:
        fault = self._next_fault(method)
        if fault is None:
            return False
        if fault == "hang":
            time.sleep(1.5)
            self.close_connection = True
        elif fault == "break":
            self.close_connection = True
        else:
            self._json(fault, {"message": "busy"}, {"Retry-After": "1"} if fault == 429 else {})
        return True

    def _json(self, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
