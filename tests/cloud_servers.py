"""Local HTTP servers that behave as the documentation of each platform's API says, and fail where a test asks them to.

A fault is queued for a path and used up by one request: `server.fail("/create", Fault(500))`. `after=True` does what
the request asks for and then fails to say so, as a server does whose answer is lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]


@dataclass(frozen=True)
class Fault:
    """`status` with `body`; `hang`: no answer at all until the server closes; `cut`: the connection is closed."""

    status: int = 200
    body: str | bytes | dict[str, Any] = ""
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: bool = False
    after: bool = False


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class CloudServer:
    """`token` is the only one that it accepts; `seen` are the requests that came."""

    authorization = "Bearer {}"

    def __init__(self, token: str) -> None:
        self.token = token
        self.seen: list[Request] = []
        self.faults: list[tuple[str, Fault]] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def fail(self, path: str, *faults: Fault) -> None:
        self.faults += [(path, fault) for fault in faults]

    def calls(self, path: str, method: str | None = None) -> list[Request]:
        return [r for r in self.seen if path in r.path and method in (None, r.method)]

    def answer(self, request: Request) -> Answer:
        if request.headers.get("Authorization") != self.authorization.format(self.token):
            return self.unauthorized()
        return self.handle(request)

    def unauthorized(self) -> Answer:
        raise NotImplementedError

    def handle(self, request: Request) -> Answer:
        raise NotImplementedError

    def next_fault(self, request: Request) -> Fault | None:
        for index, (path, fault) in enumerate(self.faults):
            if path in request.path:
                del self.faults[index]
                return fault
        return None


@contextmanager
def serve(server: CloudServer) -> Iterator[str]:
    """The base URL of `server`, on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            request = Request(
                self.command, parts.path, query, dict(self.headers.items()), json.loads(content) if content else None
            )
            with server.lock:
                server.seen.append(request)
                fault = server.next_fault(request)
                status, values = server.answer(request) if fault is None or fault.after else (0, None)
            if fault is None:
                return self.send(status, values, {})
            if fault.hang:
                server.closing.wait(5)
            if fault.hang or fault.cut:
                self.close_connection = True
                return None
            return self.send(fault.status, fault.body, fault.headers)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = respond  # noqa: N815

        def send(self, status: int, values: Any, headers: dict[str, str]) -> None:
            text = values if isinstance(values, (str, bytes)) else json.dumps(values)
            content = text.encode() if isinstance(text, str) else text
            content = b"" if status == 204 else content
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    listener.block_on_close = False
    thread = threading.Thread(target=lambda: listener.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        server.closing.set()
        listener.shutdown()
        listener.server_close()
        thread.join()


class AutoDLServer(CloudServer):
    """https://www.autodl.com/docs/instance_pro_api/: refusals are HTTP 200 with a code; creating takes a few polls."""

    authorization = "{}"
    stages = ("creating", "starting", "running")

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.instances: dict[str, dict[str, Any]] = {}
        self.refuse_create: tuple[str, str] | None = None
        self.verified = True

    def unauthorized(self) -> Answer:
        return 200, {"code": "AuthorizeFailed", "msg": f"登录超时 {self.token[:3]}", "data": None, "request_id": "r"}

    def handle(self, request: Request) -> Answer:
        if not self.verified:
            return self.refuse("TORealName", "请先完成实名认证")
        verb = request.path.removeprefix("/api/v1/dev/").replace("instance/pro/", "").replace("/", "_")
        given = request.query if request.method == "GET" else request.body
        return getattr(self, f"on_{verb}")(given)

    def ok(self, data: Any) -> Answer:
        return 200, {"code": "Success", "msg": "", "data": data, "request_id": "r"}

    def refuse(self, code: str, msg: str) -> Answer:
        return 200, {"code": code, "msg": msg, "data": None, "request_id": "r"}

    def on_create(self, given: dict[str, Any]) -> Answer:
        if self.refuse_create:
            return self.refuse(*self.refuse_create)
        missing = {"req_gpu_amount", "expand_system_disk_by_gb", "gpu_spec_uuid", "image_uuid", "cuda_v_from"} - set(
            given
        )
        if missing:
            return self.refuse("RequestParameterIsWrong", f"参数错误 {sorted(missing)}")
        made = f"pro-{len(self.instances):012x}"
        self.instances[made] = {"uuid": made, "name": given["instance_name"], "polls": 0, "status": "", **given}
        return self.ok(made)

    def on_status(self, given: dict[str, str]) -> Answer:
        row = self.instances.get(given.get("instance_uuid", ""))
        if row is None:
            return self.refuse("InstanceNotFound", "实例不存在")
        if not row["status"] or row["status"] in self.stages[:-1]:
            row["status"] = self.stages[min(row["polls"], len(self.stages) - 1)]
            row["polls"] += 1
        elif row["status"] == "shutting_down":
            row["polls"] += 1
            row["status"] = "shutdown" if row["polls"] > 2 else "shutting_down"
        return self.ok(row["status"])

    def on_snapshot(self, given: dict[str, str]) -> Answer:
        port, host = 34222, "connect.xxx.autodl.com"
        found = {"ssh_command": f"ssh -p {port} root@{host}", "proxy_host": host, "ssh_port": port}
        return self.ok({**found, "root_password": "box-password", "payg_price": 1970})

    def on_list(self, given: dict[str, int]) -> Answer:
        start, size = given["page_size"] * (given["page_index"] - 1), given["page_size"]
        rows = list(self.instances.values())
        return self.ok({"list": rows[start : start + size], "page_index": given["page_index"],
                        "max_page": -(-len(rows) // size), "result_total": len(rows)})  # fmt: skip

    def on_power_on(self, given: dict[str, str]) -> Answer:
        self.instances[given["instance_uuid"]].update(status="", polls=0)
        return self.ok(None)

    def on_power_off(self, given: dict[str, str]) -> Answer:
        if given["instance_uuid"] not in self.instances:
            return self.refuse("InstanceNotFound", "实例不存在")
        self.instances[given["instance_uuid"]].update(status="shutting_down", polls=0)
        return self.ok(None)

    def on_release(self, given: dict[str, str]) -> Answer:
        if self.instances[given["instance_uuid"]]["status"] != "shutdown":
            return self.refuse("InstanceStatusWrong", "请先关机")
        del self.instances[given["instance_uuid"]]
        return self.ok(None)

    def on_wallet_balance(self, given: dict[str, str]) -> Answer:
        return self.ok({"assets": 12_340, "accumulate": 987_650, "voucher_balance": 5_000})

    def on_machine_region_gpu_stock(self, given: dict[str, str]) -> Answer:
        return self.ok([{"RTX 5090": {"idle_gpu_num": 3, "total_gpu_num": 100}}, {"H800": {"idle_gpu_num": 0}}])
