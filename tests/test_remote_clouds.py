"""The APIs of AutoDL, RunPod, Vast and Lambda, against local servers written from their documentation."""

from __future__ import annotations

import io
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloud_servers import AutoDLServer, CloudServer, Fault, LambdaServer, RunPodServer, VastServer, serve
from sojourn.errors import UserError
from sojourn.remote.platforms.autodl import AutoDL
from sojourn.remote.platforms.base import AccountBlocked, NotFound, Offer, OutOfStock, WrongToken
from sojourn.remote.platforms.http_api import ApiError, HttpApi, Unreachable
from sojourn.remote.platforms.lambda_cloud import LambdaCloud
from sojourn.remote.platforms.renting import rent, ssh_answers, unique_name
from sojourn.remote.platforms.runpod import RunPod
from sojourn.remote.platforms.vast import Vast

CANARY = "canary-3f9a1c77e2d84b60"


@pytest.fixture(autouse=True)
def no_canary_anywhere(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test provokes, the token is in no message and no log."""
    monkeypatch.setenv("NO_PROXY", "*")
    logged, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(logged), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield
    root.removeHandler(handler)
    root.setLevel(level)
    out, err = capfd.readouterr()
    assert CANARY not in out + err + logged.getvalue()


class Slept(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def slept() -> Slept:
    return Slept()


def refusal(kind: type[UserError], call: Any, *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert CANARY not in text
    assert CANARY not in repr(caught.value.__context__)
    return text


@pytest.fixture
def autodl(slept: Slept) -> Iterator[tuple[AutoDLServer, AutoDL]]:
    server = AutoDLServer(CANARY)
    with serve(server) as url:
        yield server, AutoDL(CANARY, url, sleep=slept, timeout=0.3)


OFFER = Offer("autodl", "5090-p", "RTX 5090", 1, 3.24, "CNY")


class Plain(CloudServer):
    """Answers {"n": number of requests}."""

    def unauthorized(self) -> tuple[int, Any]:
        return 401, {"message": f"no such key {self.seen[-1].headers.get('Authorization')}"}

    def handle(self, request: Any) -> tuple[int, Any]:
        return 200, {"n": len(self.seen)}


@pytest.fixture
def plain(slept: Slept) -> Iterator[tuple[Plain, HttpApi]]:
    server = Plain(CANARY)
    with serve(server) as url:
        yield server, HttpApi("Plain", url, {"Authorization": f"Bearer {CANARY}"}, CANARY, sleep=slept, timeout=0.3)


def test_server_errors_and_timeouts_are_tried_again_with_back_off(plain: Any, slept: Slept) -> None:
    server, api = plain
    server.fail("/x", Fault(500), Fault(503, "<html>down</html>"), Fault(hang=True), Fault(cut=True))
    assert api.get("/x") == {"n": 5}
    assert [round(0.25 * 2**n, 2) <= seconds <= 0.75 * 2**n for n, seconds in enumerate(slept)] == [True] * 4


def test_an_order_is_not_repeated_after_a_server_error(plain: Any, slept: Slept) -> None:
    server, api = plain
    server.fail("/x", Fault(500, {"message": "upstream"}))
    assert "upstream" in refusal(ApiError, api.order, "POST", "/x", {})
    assert len(server.seen) == 1


def test_an_order_is_repeated_when_the_platform_was_too_busy_to_take_it(plain: Any, slept: Slept) -> None:
    server, api = plain
    server.fail("/x", Fault(429, headers={"Retry-After": "7"}), Fault(429))
    assert api.order("POST", "/x", {}) == {"n": 3}
    assert 7 <= slept[0] <= 9
    assert slept[1] <= 2


def test_a_retry_after_date_is_honoured_and_a_long_one_is_shown(plain: Any, slept: Slept) -> None:
    server, api = plain
    server.fail("/x", Fault(429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}))
    assert api.get("/x") == {"n": 2}
    server.fail("/x", Fault(429, headers={"Retry-After": "3600"}))
    assert "wait 3600 s" in refusal(ApiError, api.get, "/x")
    server.fail("/x", *[Fault(429)] * 5)
    assert "too many requests" in refusal(ApiError, api.get, "/x")


@pytest.mark.parametrize("body", ['{"half": ', "<html><title>Sign in to WiFi</title></html>", b"\xff\xfe\x00"])
def test_an_answer_that_is_no_json_is_one_line(plain: Any, body: Any) -> None:
    server, api = plain
    server.fail("/x", *[Fault(200, body)] * 5)
    text = refusal(ApiError, api.get, "/x")
    assert "a web page (Sign in to WiFi)" in text or "not JSON" in text


def test_a_refused_connection_is_tried_again_and_then_one_line(slept: Slept) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        api = HttpApi("Plain", f"http://127.0.0.1:{unused.getsockname()[1]}", {}, CANARY, sleep=slept, timeout=0.3)
        assert "cannot be reached" in refusal(Unreachable, api.order, "POST", "/x", {})
    assert len(slept) == 4


def test_the_token_does_not_follow_a_redirect(plain: Any) -> None:
    server, api = plain
    other = Plain(CANARY)
    with serve(other) as elsewhere:
        server.fail("/x", Fault(302, headers={"Location": f"{elsewhere}/x"}))
        assert "redirects" in refusal(ApiError, api.get, "/x")
    assert other.seen == []


def test_the_token_is_sent_over_nothing_but_https() -> None:
    assert "https" in refusal(UserError, HttpApi, "Plain", "http://api.example.com", {}, CANARY)


def test_a_token_that_the_server_repeats_is_not_shown(plain: Any) -> None:
    server, api = plain
    server.fail("/x", Fault(400, {"message": f"bad key {CANARY}\nsecond line"}))
    assert "bad key *** second line" in refusal(ApiError, api.get, "/x")


def test_autodl_lists_offers_with_stock_and_the_catalogues_price(autodl: Any) -> None:
    _, cloud = autodl
    found = {offer.id: offer for offer in cloud.offers()}
    assert (found["5090-p"].available, found["5090-p"].price_per_hour) == (True, 3.24)
    assert "6 idle" in found["5090-p"].note
    assert (found["h800"].available, found["h800"].price_per_hour) == (None, None)  # none idle is a hint
    assert [offer.id for offer in cloud.offers("5090")] == ["5090-p"]


def test_autodl_creates_waits_and_gives_the_ssh_line(autodl: Any, slept: Slept) -> None:
    server, cloud = autodl
    said: list[str] = []
    tries = iter([False, True])
    ready = rent(cloud, OFFER, "my box", 50, None, None, say=said.append, sleep=slept, answers=lambda *_: next(tries))
    assert ready.ssh_line == "ssh -p 34222 root@connect.xxx.autodl.com"
    assert (ready.password, ready.price_per_hour, ready.currency) == ("box-password", 1.97, "CNY")
    assert ready.name.startswith("sojourn-my-box-")
    assert "box-password" not in repr(ready) + "".join(said)
    assert "sojourn cloud release autodl pro-" in said[0]
    assert "costs money" in said[0]
    [made] = server.instances.values()
    assert made["name"].startswith("sojourn-my-box-")
    assert (made["expand_system_disk_by_gb"], made["gpu_spec_uuid"]) == (50, "5090-p")


@pytest.mark.parametrize("fault", [Fault(hang=True, after=True), Fault(500, after=True), Fault(200, "{", after=True),
                                   Fault(cut=True, after=True)])  # fmt: skip
def test_a_create_whose_answer_is_lost_makes_one_instance(autodl: Any, fault: Fault) -> None:
    server, cloud = autodl
    server.fail("/create", fault)
    made = cloud.create(OFFER, unique_name("a"), 0)
    assert list(server.instances) == [made.id]
    assert len(server.calls("/create")) == 1


def test_a_create_that_never_happened_is_ordered_once_more(autodl: Any, slept: Slept) -> None:
    server, cloud = autodl
    server.fail("/create", Fault(502))
    made = cloud.create(OFFER, unique_name("a"), 0)
    assert list(server.instances) == [made.id]
    assert sum(slept) > 30  # it looked for the first one long enough
    server.fail("/create", Fault(502), Fault(502))
    assert "no instance called" in refusal(UserError, cloud.create, OFFER, unique_name("b"), 0)


def test_an_order_that_was_carried_out_late_is_found_and_named(autodl: Any, slept: Slept) -> None:
    server, cloud = autodl
    server.fail("/create", Fault(504, after=True))
    server.fail("/list", *[Fault(200, {"code": "Success", "data": {"list": [], "max_page": 0}})] * 5)
    text = refusal(UserError, cloud.create, OFFER, unique_name("a"), 0)
    assert "created twice" in text
    assert "sojourn cloud release autodl pro-000000000000" in text


def test_ctrl_c_during_an_order_says_what_may_exist(autodl: Any, slept: Slept, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cloud = autodl
    said: list[str] = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(cloud, "create", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rent(cloud, OFFER, "a", 0, None, None, say=said.append, sleep=slept)
    assert "may have been created" in said[-1]
    with pytest.raises(KeyboardInterrupt):
        rent(cloud, OFFER, "a", 0, None, None, say=said.append, sleep=interrupt)
    assert "still exists and costs money" in said[-1]


def test_without_a_list_of_instances_nothing_is_ordered_twice(autodl: Any) -> None:
    server, cloud = autodl
    server.fail("/create", Fault(hang=True))
    server.fail("/list", *[Fault(500)] * 25)
    assert "may have been created" in refusal(UserError, cloud.create, OFFER, unique_name("a"), 0)
    assert len(server.calls("/create")) == 1


@pytest.mark.parametrize(
    ("code", "said", "kind", "shown"),
    [
        ("InternalError", "机器暂无库存", OutOfStock, "out of stock"),
        ("BalanceNotEnough", "余额不足", AccountBlocked, "not enough money"),
        ("InstanceNumLimit", "实例数量已达上限", AccountBlocked, "quota"),
        ("RequestParameterIsWrong", "参数错误", ApiError, "参数错误"),
    ],
)
def test_autodl_refusals_say_what_to_do(autodl: Any, code: str, said: str, kind: Any, shown: str) -> None:
    server, cloud = autodl
    server.refuse_create = (code, said)
    assert shown in refusal(kind, cloud.create, OFFER, unique_name("a"), 0)
    assert len(server.calls("/create")) == 1
    server.fail("/create", Fault(500, {"code": code, "msg": said}))
    if kind is not ApiError:
        refusal(kind, cloud.create, OFFER, unique_name("a"), 0)


def test_autodl_wants_a_verified_identity(autodl: Any) -> None:
    server, cloud = autodl
    server.verified = False
    assert "实名认证" in refusal(AccountBlocked, cloud.create, OFFER, unique_name("a"), 0)


def test_autodl_does_not_accept_a_wrong_token(autodl: Any) -> None:
    server, cloud = autodl
    server.token = "another"
    for call in (cloud.balance, cloud.offers, cloud.list_instances):
        assert "SOJOURN_AUTODL_TOKEN" in refusal(WrongToken, call)
    for status in (401, 403):
        server.fail("/balance", Fault(status, "<html>"))
        refusal(WrongToken, cloud.balance)


def test_autodl_releases_only_after_power_off(autodl: Any) -> None:
    server, cloud = autodl
    made = cloud.create(OFFER, unique_name("a"), 0)
    cloud.release(made.id)
    assert server.instances == {}
    verbs = [request.path.rsplit("/", 1)[1] for request in server.seen]
    assert verbs.index("power_off") < verbs.index("release")
    cloud.release(made.id)  # gone already
    refusal(NotFound, cloud.status, made.id)


def test_autodl_stops_starts_lists_and_tells_the_balance(autodl: Any) -> None:
    server, cloud = autodl
    made = [cloud.create(OFFER, f"n{index}", 0) for index in range(60)]
    cloud.stop(made[0].id)
    states = [cloud.status(made[0].id).state for _ in range(3)]
    assert states == ["stopping", "stopping", "stopped"]
    cloud.start(made[0].id)
    assert cloud.status(made[0].id).state == "creating"
    assert [one.name for one in cloud.list_instances()] == [f"n{index}" for index in range(60)]
    assert (cloud.balance().amount, cloud.balance().note) == (12.34, "and ¥5.00 in vouchers")
    assert server.seen[0].headers["Authorization"] == CANARY


def test_waiting_ends_when_an_instance_will_not_start(autodl: Any, slept: Slept) -> None:
    server, cloud = autodl
    server.stages = ("creating", "error", "error")
    said: list[str] = []
    with pytest.raises(UserError, match="error and will not start by itself; it still exists: sojourn cloud release"):
        rent(cloud, OFFER, "a", 0, None, None, say=said.append, sleep=slept)
    server.stages = ("creating",) * 3
    with pytest.raises(UserError, match="not ready after 1 minutes"):
        rent(cloud, OFFER, "a", 0, None, None, say=said.append, sleep=slept, patience=60)


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILXGDN sojourn"
OTHERS = {"runpod": (RunPodServer, RunPod), "vast": (VastServer, Vast), "lambda": (LambdaServer, LambdaCloud)}
EVERY = {"autodl": (AutoDLServer, AutoDL), **OTHERS}


@pytest.fixture
def market(request: pytest.FixtureRequest, slept: Slept) -> Iterator[tuple[Any, Any]]:
    make_server, make_cloud = EVERY[request.param]
    server = make_server(CANARY)
    with serve(server) as url:
        yield server, make_cloud(CANARY, url, sleep=slept, timeout=0.3)


def each(*names: str) -> Any:
    return pytest.mark.parametrize("market", names or tuple(EVERY), indirect=True)


def _rented(server: Any) -> Any:
    return server.pods if isinstance(server, RunPodServer) else server.instances


def _first(cloud: Any) -> Offer:
    return next(offer for offer in cloud.offers() if offer.available)


CREATE = {"autodl": "/create", "runpod": "/v2/pods", "vast": "/asks/", "lambda": "/launch"}


@each("runpod")
def test_runpod_lists_secure_and_community_prices(market: Any) -> None:
    server, cloud = market
    found = {(offer.region, offer.gpu): offer for offer in cloud.offers(count=2)}
    assert found["secure cloud", "RTX 4090"].price_per_hour == 1.38
    assert found["community cloud", "RTX 4090"].price_per_hour == 0.68
    assert found["secure cloud", "H200"].available is False
    assert ("community cloud", "H200") not in found
    assert {offer.region for offer in cloud.offers("4090", count=4)} == {"secure cloud"}
    assert cloud.offers(spot=True) == []
    assert cloud.balance().amount == 21.5
    server.fail("/graphql", Fault(400, {"errors": [{"message": "no"}]}))
    assert cloud.balance().amount is None


@each("vast")
def test_vast_lists_the_cheapest_machines_of_a_card(market: Any) -> None:
    server, cloud = market
    assert [offer.price_per_hour for offer in cloud.offers("4090")] == [0.28, 0.31, 0.45]
    assert cloud.offers("A100 80GB")[0].gpu == "A100 80GB"
    assert "10 days" in cloud.offers("4090")[0].note
    bids = cloud.offers("4090", spot=True)
    assert bids[0].spot
    assert server.seen[-1].body["type"] == "bid"
    made = cloud.create(bids[0], "label", 1)
    assert server.instances[int(made.id)]["body"]["price"] == 0.28
    assert cloud.balance().amount == 9.75


@each("lambda")
def test_lambda_lists_regions_and_types_without_capacity(market: Any) -> None:
    _, cloud = market
    found = {offer.id: offer for offer in cloud.offers()}
    assert set(found) == {"gpu_1x_a10@us-west-1", "gpu_1x_a10@us-east-1", "gpu_1x_h100_pcie"}
    assert (found["gpu_1x_h100_pcie"].available, found["gpu_1x_h100_pcie"].gpu) == (False, "H100 PCIe")
    assert [(offer.gpu, offer.price_per_hour) for offer in cloud.offers(count=8)] == [("A100 40GB", 10.32)]
    assert "no region" in refusal(OutOfStock, cloud.create, found["gpu_1x_h100_pcie"], "n", 0, None, KEY)
    assert "does not tell" in cloud.balance().note


@each(*OTHERS)
def test_a_machine_is_created_waited_for_stopped_and_released(market: Any, slept: Slept) -> None:
    server, cloud = market
    said: list[str] = []
    ready = rent(cloud, _first(cloud), "box", 60, None, KEY, say=said.append, sleep=slept, answers=lambda *_: True)
    lines = {"runpod": "ssh -p 43210 root@45.23.12.1", "vast": "ssh -p 20022 root@203.0.113.7",
             "lambda": "ssh -p 22 ubuntu@198.51.100.2"}  # fmt: skip
    assert ready.ssh_line == lines[cloud.name]
    assert ready.name.startswith("sojourn-box-")
    assert ready.price_per_hour
    assert [one.id for one in cloud.list_instances()] == [ready.id]
    if cloud.can_stop:
        cloud.stop(ready.id)
        assert cloud.status(ready.id).state == "stopped"
        cloud.start(ready.id)
        assert cloud.status(ready.id).state in ("creating", "running")
    else:
        assert "only release" in refusal(UserError, cloud.stop, ready.id)
    cloud.release(ready.id)
    cloud.release(ready.id)
    assert not _rented(server)
    refusal(NotFound, cloud.status, ready.id)
    assert server.seen[0].headers["Authorization"] == f"Bearer {CANARY}"


def test_our_key_reaches_every_machine(slept: Slept) -> None:
    for make_server, make_cloud in OTHERS.values():
        server = make_server(CANARY)
        with serve(server) as url:
            cloud = make_cloud(CANARY, url, sleep=slept)
            made = [cloud.create(_first(cloud), f"n{index}", 40, None, KEY) for index in range(2)]
        if isinstance(server, RunPodServer):
            assert server.pods[made[0].id]["env"] == {"PUBLIC_KEY": KEY}
            assert server.pods[made[0].id]["mounts"]["persistent"] == {"size": 40, "path": "/workspace"}
        elif isinstance(server, VastServer):
            assert server.keys == [KEY, KEY]
        else:
            assert [key["public_key"] for key in server.keys] == [KEY]  # added once


@each(*OTHERS)
@pytest.mark.parametrize("fault", [Fault(hang=True, after=True), Fault(502, "<html>", after=True),
                                   Fault(200, "[]", after=True)])  # fmt: skip
def test_a_lost_answer_rents_one_machine_everywhere(market: Any, fault: Fault) -> None:
    server, cloud = market
    offer = _first(cloud)
    server.fail(CREATE[cloud.name], fault)
    made = cloud.create(offer, unique_name("a"), 20, None, KEY)
    assert [str(number) for number in _rented(server)] == [made.id]


@each()
def test_busy_and_broken_servers_are_tried_again_everywhere(market: Any, slept: Slept) -> None:
    server, cloud = market
    server.fail(
        "/",
        Fault(429, "API requests too frequent"),
        Fault(429, headers={"Retry-After": "3"}),
        Fault(500),
        Fault(200, "{"),
    )
    assert cloud.list_instances() == []
    assert len(server.seen) == 5
    assert slept[1] >= 3


@each()
def test_a_wrong_token_is_named_with_its_variable(market: Any) -> None:
    server, cloud = market
    server.token = "another"
    variable = {
        "autodl": "SOJOURN_AUTODL_TOKEN",
        "runpod": "RUNPOD_API_KEY",
        "vast": "VAST_API_KEY",
        "lambda": "LAMBDA_API_KEY",
    }
    for call in (cloud.list_instances, cloud.offers):
        assert variable[cloud.name] in refusal(WrongToken, call)
    assert len(server.seen) == 2  # not tried again


def problem(status: int, detail: str) -> Any:
    return status, {"title": "refused", "status": status, "detail": detail}


def vast_error(status: int, error: str, msg: str) -> Any:
    return status, {"success": False, "error": error, "msg": msg}


def lambda_error(status: int, code: str) -> Any:
    return status, {"error": {"code": code, "message": "No.", "suggestion": "Contact Support."}}


REFUSALS = [
    ("runpod", problem(400, "There are no longer any instances available with these specifications."), OutOfStock),
    ("runpod", problem(402, "insufficient balance"), AccountBlocked),
    ("runpod", problem(403, "verify your account"), AccountBlocked),
    ("runpod", problem(400, "quota exceeded for this GPU"), AccountBlocked),
    ("runpod", problem(422, "$.disk: below 1"), ApiError),
    ("vast", vast_error(410, "no_such_ask", "no longer available"), OutOfStock),
    ("vast", vast_error(400, "insufficient_credit", "Your account lacks credit"), AccountBlocked),
    ("vast", vast_error(403, "forbidden", "verify your email first"), AccountBlocked),
    ("vast", vast_error(200, "invalid_args", "bad image"), ApiError),
    ("lambda", lambda_error(400, "instance-operations/launch/insufficient-capacity"), OutOfStock),
    ("lambda", lambda_error(400, "global/quota-exceeded"), AccountBlocked),
    ("lambda", lambda_error(403, "global/account-inactive"), AccountBlocked),
]


@pytest.mark.parametrize(("market", "answer", "kind"), REFUSALS, indirect=["market"])
def test_a_refusal_is_one_line_of_its_kind_and_ordered_once(market: Any, answer: Any, kind: Any) -> None:
    server, cloud = market
    offer = _first(cloud)
    server.refuse_create = answer
    refusal(kind, cloud.create, offer, unique_name("a"), 20, None, KEY)
    orders = server.calls(CREATE[cloud.name], "PUT" if cloud.name == "vast" else "POST")
    assert len(orders) == 1


JUNK = [
    "null", "[]", "7", '"x"', '{"data": 3}', '{"code": "Success", "data": [1, null]}',
    '{"gpus": {"a": 1}, "pods": "x", "instances": [3, null, {"id": {}, "ports": [1]}]}',
]  # fmt: skip


@each()
@pytest.mark.parametrize("junk", JUNK)
def test_answers_of_a_wrong_shape_are_no_tracebacks(market: Any, junk: str) -> None:
    server, cloud = market
    for call in (
        cloud.offers,
        cloud.list_instances,
        cloud.balance,
        lambda: cloud.status("1"),
        lambda: cloud.release("1"),
    ):
        server.faults = [("/", Fault(200, junk))] * 400
        try:
            call()
        except UserError as error:
            assert "\n" not in str(error)


def test_a_name_from_the_user_becomes_one_that_nobody_has() -> None:
    assert unique_name("Mein Kasten/é") != unique_name("Mein Kasten/é")
    assert unique_name("Mein Kasten/é").startswith("sojourn-mein-kasten-")
    assert len(unique_name("x" * 500)) < 64


def test_ssh_answers_only_where_a_server_greets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet(text: bytes) -> None:
            link, _ = listener.accept()
            link.sendall(text)
            link.close()

        for text, answers in ((b"SSH-2.0-OpenSSH_9.6\r\n", True), (b"HTTP/1.1 400\r\n", False), (b"", False)):
            thread = threading.Thread(target=greet, args=(text,))
            thread.start()
            assert ssh_answers("127.0.0.1", port) is answers
            thread.join()
    assert not ssh_answers("127.0.0.1", port)
