"""`sojourn cloud`, typed by a user, against local servers of the four platforms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cloud_servers import AutoDLServer, LambdaServer, RunPodServer, VastServer, serve
from sojourn.catalog.live_prices import live_file
from sojourn.catalog.prices import prices
from sojourn.cli.cloud import cloud_app
from sojourn.errors import UserError
from sojourn.remote.hosts import Host, load_hosts, save_host
from sojourn.remote.job import Job
from sojourn.remote.platforms.registry import token_variable

CANARY = "canary-3f9a1c77e2d84b60"
SERVERS = {"autodl": AutoDLServer, "runpod": RunPodServer, "vast": VastServer, "lambda": LambdaServer}


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Types `sojourn cloud …` with servers of all four platforms: gives the exit code, both outputs and the servers."""
    servers = {name: make_server(CANARY) for name, make_server in SERVERS.items()}
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SOJOURN_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    monkeypatch.setattr("sojourn.remote.platforms.renting.ssh_answers", lambda *_: True)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with ExitStack() as stack:
        for name, server in servers.items():
            monkeypatch.setenv(f"SOJOURN_{name.upper()}_URL", stack.enter_context(serve(server)))
            monkeypatch.setenv(token_variable(name), CANARY)

        def run(*words: str) -> tuple[int, str, str]:
            result = CliRunner().invoke(cloud_app, list(words))
            code = result.exception.code if isinstance(result.exception, UserError) else result.exit_code
            said = str(result.exception) if isinstance(result.exception, UserError) else ""
            if result.exception is not None and not isinstance(result.exception, (UserError, SystemExit)):
                raise result.exception
            assert CANARY not in result.output + said
            return code, result.stdout, result.stderr + said

        run.servers = servers  # type: ignore[attr-defined]
        yield run


def test_offers_of_all_platforms_are_one_table_by_price(typed: Any) -> None:
    code, out, _ = typed("offers", "--gpu", "4090")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["PLATFORM", "vast", "vast", "runpod", "vast", "runpod"]
    code, out, _ = typed("offers", "lambda", "--json", "--count", "8")
    assert json.loads(out)[0]["price_per_hour"] == 10.32
    assert "no offers of T4" in typed("offers", "vast", "--gpu", "T4")[1]


def test_a_platform_that_fails_does_not_hide_the_others(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed.servers["vast"].token = "another"
    code, out, err = typed("offers", "--gpu", "4090")
    assert (code, "runpod" in out) == (0, True)
    assert "VAST_API_KEY" in err
    assert typed("offers", "vast")[0] == 2
    assert "vast" not in typed("balance")[1]
    assert "runpod: $21.50" in typed("balance")[1]
    for name in SERVERS:
        monkeypatch.delenv(token_variable(name))
    assert "RUNPOD_API_KEY (runpod)" in typed("offers")[2]


def test_live_prices_reach_the_plan_for_a_day(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> dict[Any, Any]:
        return {(price.platform, price.gpu): price for price in prices()}

    before = known()
    code, out, _ = typed("offers", "--save")
    assert code == 0
    assert "sojourn plan uses them for 24 hours" in out
    live = known()["vast", "RTX 4090"]
    assert (live.per_hour, live.currency, live.source) == (0.28, "USD", "Vast's API")
    assert ("runpod", "H200") not in known() or known()["runpod", "H200"] == before.get(("runpod", "H200"))  # none free
    typed.servers["vast"].asks = {7: 0.5}
    typed("offers", "vast", "--gpu", "4090", "--save")
    assert known()["vast", "RTX 4090"].per_hour == 0.5
    assert known()["runpod", "RTX 4090"].per_hour == 0.34
    assert "leave out --count" in typed("offers", "--save", "--count", "2")[2]
    own = user_file_in_home('[price.vast."RTX 4090"]\nper_hour = 0.2\ncurrency = "USD"\n')
    assert known()["vast", "RTX 4090"].per_hour == 0.2
    own.unlink()
    with monkeypatch.context() as later:
        later.setattr("sojourn.catalog.live_prices.VALID_HOURS", -1.0)
        assert known() == before
    for broken in ("{", "[]", '{"prices": [{"platform": "vast"}, 3]}', "\0"):
        live_file().parent.mkdir(parents=True, exist_ok=True)
        live_file().write_text(broken)
        assert known()


def user_file_in_home(text: str) -> Path:
    path = Path(os.environ["SOJOURN_HOME"]) / "catalog.toml"
    path.write_text(text)
    return path


def test_create_asks_first_and_prints_the_line_to_add_it(typed: Any) -> None:
    code, _, err = typed("create", "vast", "--gpu", "4090")
    assert (code, "--yes" in err) == (2, True)
    assert not typed.servers["vast"].instances
    code, out, _ = typed("create", "vast", "--gpu", "4090", "--yes")
    assert code == 0
    assert out.splitlines()[-1] == 'add it: sojourn host add NAME "ssh -p 20022 root@203.0.113.7"'
    assert typed.servers["vast"].asks.keys() == {101, 103}  # the cheapest is rented
    code, out, _ = typed("create", "autodl", "5090-p", "--yes", "--json")
    made = json.loads(out)
    assert (made["ssh"], "password" in made, "box-password" in out) == (
        "ssh -p 34222 root@connect.xxx.autodl.com",
        False,
        False,
    )
    assert "no offer" in typed("create", "vast", "999", "--yes")[2]
    assert "name an offer or a GPU" in typed("create", "vast")[2]


def test_create_adds_the_host_with_its_instance_and_price(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def add_host(name: str, line: str, passwords: Any, given: Any, say: Any) -> Any:
        asked.append((name, line, passwords.ask("password? "), given))
        save_host(Host(name, "root", "connect.xxx.autodl.com", 34222, platform="autodl"))
        return SimpleNamespace(host=Host(name, "root", "connect.xxx.autodl.com", 34222, platform="autodl"))

    monkeypatch.setattr("sojourn.remote.add_host.add_host", add_host)
    code, out, _ = typed("create", "autodl", "5090-p", "--yes", "--add", "box1")
    assert code == 0
    [(name, line, password, given)] = asked
    assert (name, line, password) == ("box1", "ssh -p 34222 root@connect.xxx.autodl.com", "box-password")
    assert (str(given.price.amount), given.price.currency, given.platform) == ("1.97", "CNY", "autodl")
    assert load_hosts()["box1"].instance == "pro-000000000000"
    assert "box-password" not in out
    before = len(typed.servers["autodl"].instances)
    assert typed("create", "autodl", "5090-p", "--yes", "--add", "box1")[0] == 2  # the name is taken
    assert len(typed.servers["autodl"].instances) == before


def test_a_machine_whose_run_would_be_lost_is_not_released(typed: Any) -> None:
    typed("create", "autodl", "5090-p", "--yes")
    server = typed.servers["autodl"]
    [made] = server.instances
    # added by its ssh line
    save_host(Host("box1", "root", "connect.xxx.autodl.com", 34222, platform="autodl", home="/root/autodl-tmp"))
    job = Job("run1", "box1", (), "/nowhere", ())
    job.save()
    for verb in ("stop", "release"):
        code, _, err = typed(verb, "autodl", made, "--yes")
        assert (code, "may still be running" in err) == (2, True)
    replace(job, last={"state": "stopped"}).save()
    code, _, err = typed("release", "autodl", made, "--yes")
    assert (code, "sojourn pull run1" in err) == (2, True)
    assert typed("stop", "autodl", made, "--yes")[0] == 0  # its folder survives that
    server.instances[made]["status"] = "shutdown"  # off: no address tells which host it is
    assert typed("release", "autodl", made, "--yes")[0] == 2
    assert server.instances
    replace(job, pulled=True).save()
    assert "--yes" in typed("release", "autodl", made)[2]
    assert typed("release", "autodl", made, "--yes")[:2] == (0, f"{made} is released\n")
    assert not server.instances


def test_a_run_on_a_disk_that_a_stop_wipes_keeps_the_machine(typed: Any) -> None:
    typed("create", "runpod", "--gpu", "4090", "--yes")
    save_host(Host("pod", "root", "45.23.12.1", 43210, platform="runpod", home="/root", instance="pod0"))
    Job("run1", "pod", (), "/nowhere", (), last={"state": "done"}).save()
    assert "sojourn pull run1" in typed("stop", "runpod", "pod0", "--yes")[2]
    save_host(replace(load_hosts()["pod"], home="/workspace"), replace=True)
    assert typed("stop", "runpod", "pod0", "--yes")[0] == 0
    assert "sojourn pull run1" in typed("release", "runpod", "pod0", "--yes")[2]


def test_stop_start_and_status_by_hand(typed: Any) -> None:
    typed("create", "runpod", "--gpu", "4090", "--yes")
    assert "sojourn cloud start runpod pod0" in typed("stop", "runpod", "pod0", "--yes")[1]
    assert "exited" in typed("status", "runpod", "pod0")[1]
    assert typed("start", "runpod", "pod0", "--yes")[0] == 0
    assert "sojourn-box-" in typed("status")[1]
    assert json.loads(typed("status", "--json")[1])[0]["id"] == "pod0"
    assert "no machines on vast" in typed("status", "vast")[1]
    assert "only release" in typed("stop", "lambda", "x", "--yes")[2]
    assert "did you mean" in typed("status", "rumpod")[2]
    for platform in SERVERS:
        code, out, _ = typed("release", platform, "77", "--yes")
        assert (code, out) == (2, "")  # a mistyped id is not "released"


def test_the_cloud_commands_import_no_http_client_until_they_need_one() -> None:
    code = (
        "import sys, sojourn.cli.cloud; print([m for m in ('httpx', 'asyncssh', 'sojourn.remote') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
