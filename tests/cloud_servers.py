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
        wbufsize = -1  # one packet per answer: two would wait for the client's delayed acknowledgement

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


class RunPodServer(CloudServer):
    """https://api.runpod.io/v2/openapi.json: errors are RFC 9457 problems; unknown fields of a request are refused."""

    stages = ("PROVISIONING", "STARTING", "RUNNING")

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.pods: dict[str, dict[str, Any]] = {}
        self.refuse_create: Answer | None = None

    def problem(self, status: int, detail: str) -> Answer:
        return status, {"title": "refused", "status": status, "detail": detail}

    def unauthorized(self) -> Answer:
        return self.problem(401, "invalid api key")

    def handle(self, request: Request) -> Answer:
        parts = request.path.strip("/").split("/")
        if request.path == "/graphql":
            return 200, {"data": {"myself": {"clientBalance": 21.5}}}
        if request.path == "/v2/catalog/gpus":
            return self.catalog(request.query)
        if request.path == "/v2/pods":
            return self.create(request.body) if request.method == "POST" else (200, {"pods": list(self.pods.values())})
        pod = self.pods.get(parts[2])
        if pod is None:
            return self.problem(404, "pod not found")
        if request.method == "DELETE":
            del self.pods[parts[2]]
            return 204, ""
        if parts[-1] == "action":
            pod["status"] = {"stop": "EXITED", "start": "STARTING"}[request.body["action"]]
            return 200, pod
        return 200, self.polled(pod)

    def catalog(self, query: dict[str, str]) -> Answer:
        if query.get("include") == "AVAILABILITY" and "product" not in query:
            return self.problem(400, "include=AVAILABILITY requires product")
        card = {"id": "NVIDIA GeForce RTX 4090", "name": "RTX 4090", "memory": 24, "secure": True, "community": True,
                "price": {"secure": 0.69, "community": 0.34}, "maxCount": {"secure": 8, "community": 2},
                "availability": "HIGH", "pool": "ADA_24", "manufacturer": "NVIDIA"}  # fmt: skip
        h200 = {**card, "id": "NVIDIA H200", "name": "H200 SXM", "memory": 141, "community": False,
                "price": {"secure": 3.59, "community": 0}, "availability": "NONE"}  # fmt: skip
        amd = {**card, "id": "AMD Instinct MI300X", "name": "MI300X", "memory": 192}
        return 200, {"gpus": [card, h200, amd]}

    def create(self, body: dict[str, Any]) -> Answer:
        if self.refuse_create:
            return self.refuse_create
        known = {"name", "image", "cloud", "gpu", "disk", "mounts", "ports", "startSsh", "env", "dataCenterIds"}
        if unknown := set(body) - known:
            return self.problem(422, f"additional properties {unknown} not allowed")
        made = f"pod{len(self.pods)}"
        self.pods[made] = {**body, "id": made, "status": "PROVISIONING", "polls": 0}
        self.pods[made].update(cost=0.69 * body["gpu"]["count"], ssh={"proxy": None, "direct": None})
        return 201, self.pods[made]

    def polled(self, pod: dict[str, Any]) -> dict[str, Any]:
        if pod["status"] in self.stages:
            pod["status"] = self.stages[min(pod["polls"], len(self.stages) - 1)]
            pod["polls"] += 1
        if pod["status"] == "RUNNING":
            proxy = {"host": "ssh.runpod.io", "port": 22, "username": "x-1", "command": ""}
            direct = {"host": "45.23.12.1", "port": 43210, "username": "root", "command": ""}
            pod["ssh"] = {"proxy": proxy, "direct": direct}
        return pod


class VastServer(CloudServer):
    """https://docs.vast.ai/api-reference: errors have success, error and msg; lists come in pages of 25."""

    stages = (None, "loading", "running")

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.asks = {101: 0.31, 102: 0.28, 103: 0.45}
        self.instances: dict[int, dict[str, Any]] = {}
        self.keys: list[str] = []
        self.refuse_create: Answer | None = None

    def error(self, status: int, error: str, msg: str) -> Answer:
        return status, {"success": False, "error": error, "msg": msg}

    def unauthorized(self) -> Answer:
        return self.error(401, "auth_error", "Invalid user key")

    def handle(self, request: Request) -> Answer:
        parts = request.path.strip("/").split("/")
        match parts[2:]:
            case ["bundles"]:
                return 200, {"offers": self.found(request.body)}
            case ["users", "current"]:
                return 200, {"id": 1, "balance": 0, "credit": 9.75}
            case ["asks", ask]:
                return self.create(int(ask), request.body)
            case ["instances"]:
                return self.page(request.query)
            case ["instances", number, "ssh"]:
                self.keys.append(request.body["ssh_key"])
                return 200, {"success": True}
            case ["instances", number]:
                return self.one(request, int(number))
        return self.error(404, "not_found", "no such page")

    def found(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        rows = [
            {"id": ask, "gpu_name": "RTX 4090", "gpu_ram": 24564, "num_gpus": 1, "dph_total": price, "duration": 864000,
             "geolocation": "California, US", "reliability2": 0.997}
            for ask, price in self.asks.items()
        ]  # fmt: skip
        rows.append(
            {**rows[0], "id": 900, "gpu_name": "A100 SXM4", "gpu_ram": 81920, "dph_total": 0.9}
        ) if rows else None
        between = wanted.get("gpu_ram", {"gte": 0, "lte": 10**9})
        rows = [row for row in rows if between["gte"] <= row["gpu_ram"] <= between["lte"]]
        return sorted(rows, key=lambda row: row["dph_total"])[: wanted["limit"]]

    def create(self, ask: int, body: dict[str, Any]) -> Answer:
        if self.refuse_create:
            return self.refuse_create
        if self.asks.pop(ask, None) is None:
            msg = f"error 404/3603: no_such_ask Instance type by id {ask} is not available."
            return self.error(404, "invalid_args", msg)
        made = 5000 + len(self.instances)
        self.instances[made] = {"id": made, "actual_status": None, "intended_status": "running", "polls": 0,
                                "label": body["label"], "ssh_host": "ssh4.vast.ai", "ssh_port": 15000,
                                "public_ipaddr": "203.0.113.7 ", "dph_total": 0.3, "num_gpus": 1,
                                "gpu_name": "RTX 4090", "gpu_ram": 24564, "body": body}  # fmt: skip
        return 200, {"success": True, "new_contract": made, "instance_api_key": "d15a"}

    def page(self, query: dict[str, str]) -> Answer:
        start = int(query.get("after_token", 0))
        rows = list(self.instances.values())
        more = str(start + 25) if start + 25 < len(rows) else None
        return 200, {"success": True, "instances": rows[start : start + 25], "next_token": more}

    def one(self, request: Request, number: int) -> Answer:
        row = self.instances.get(number)
        if row is None:
            return (
                (200, {"instances": None}) if request.method == "GET" else self.error(404, "no_such_instance", "gone")
            )
        if request.method == "DELETE":
            del self.instances[number]
            return 200, {"success": True}
        if request.method == "PUT":
            row["intended_status"] = row["actual_status"] = request.body["state"]
            return 200, {"success": True}
        if row["actual_status"] in self.stages:
            row["actual_status"] = self.stages[min(row["polls"], len(self.stages) - 1)]
            row["polls"] += 1
        ports = {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "20022"}]} if row["actual_status"] == "running" else None  # noqa: S104
        return 200, {"instances": {**row, "ports": ports}}


class LambdaServer(CloudServer):
    """https://docs.lambda.ai/api/cloud: payloads under data, errors under error with a code."""

    stages = ("booting", "booting", "active")

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.instances: dict[str, dict[str, Any]] = {}
        self.keys: list[dict[str, str]] = []
        self.refuse_create: Answer | None = None

    def error(self, status: int, code: str, message: str) -> Answer:
        return status, {"error": {"code": code, "message": message, "suggestion": "Contact Support."}}

    def unauthorized(self) -> Answer:
        return self.error(401, "global/invalid-api-key", "API key was invalid, expired, or deleted.")

    def kind(self, name: str, gpu: str, gpus: int, cents: int) -> dict[str, Any]:
        return {"name": name, "description": f"{gpus}x {gpu}", "gpu_description": gpu, "price_cents_per_hour": cents,
                "specs": {"vcpus": 30, "memory_gib": 200, "storage_gib": 512, "gpus": gpus}}  # fmt: skip

    def handle(self, request: Request) -> Answer:
        parts = request.path.removeprefix("/api/v1/").split("/")
        match (request.method, *parts):
            case ("GET", "instance-types"):
                return 200, {"data": self.kinds()}
            case ("GET", "ssh-keys"):
                return 200, {"data": self.keys}
            case ("POST", "ssh-keys"):
                self.keys.append({"id": str(len(self.keys)), **request.body})
                return 200, {"data": self.keys[-1]}
            case ("POST", "instance-operations", "launch"):
                return self.launch(request.body)
            case ("POST", "instance-operations", "terminate"):
                gone = [self.instances.pop(i, None) for i in request.body["instance_ids"]]
                return (200, {"data": {"terminated_instances": gone}}) if gone[0] else self.absent()
            case ("GET", "instances"):
                return 200, {"data": list(self.instances.values())}
            case ("GET", "instances", number):
                return self.one(number)
        return self.absent()

    def absent(self) -> Answer:
        return self.error(404, "global/object-does-not-exist", "Specified instance does not exist.")

    def kinds(self) -> dict[str, Any]:
        west = {"name": "us-west-1", "description": "California, USA"}
        one, eight = (
            self.kind("gpu_1x_a10", "A10 (24 GB PCIe)", 1, 75),
            self.kind("gpu_8x_a100", "A100 (40 GB SXM4)", 8, 1032),
        )
        gone = self.kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1, 249)
        rows = [(one, [west, {"name": "us-east-1", "description": ""}]), (eight, [west]), (gone, [])]
        return {k["name"]: {"instance_type": k, "regions_with_capacity_available": regions} for k, regions in rows}

    def launch(self, body: dict[str, Any]) -> Answer:
        if self.refuse_create:
            return self.refuse_create
        if len(body["ssh_key_names"]) != 1 or body["ssh_key_names"][0] not in [key["name"] for key in self.keys]:
            return self.error(400, "global/invalid-parameters", "exactly one SSH key must be specified")
        made = f"{len(self.instances):032x}"
        self.instances[made] = {"id": made, "name": body["name"], "status": "booting", "polls": 0,
                                "instance_type": self.kinds()[body["instance_type_name"]]["instance_type"]}  # fmt: skip
        return 200, {"data": {"instance_ids": [made]}}

    def one(self, number: str) -> Answer:
        row = self.instances.get(number)
        if row is None:
            return self.absent()
        row["status"] = self.stages[min(row["polls"], len(self.stages) - 1)]
        row["polls"] += 1
        return 200, {"data": {**row, "ip": "198.51.100.2"} if row["status"] == "active" else row}
