"""`sojourn host`: the store, secrets, and adding a box whose password appears nowhere."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sojourn.cli.host import host_app
from sojourn.errors import UserError
from sojourn.remote import secrets
from sojourn.remote.describe_host import platform_of_address
from sojourn.remote.hosts import Host, config_folder, get_host, hosts_file, load_hosts, remove_host, save_host
from sojourn.remote.job import Job
from sojourn.remote.keys import (
    fingerprint,
    key_path,
    known_hosts_path,
    our_key,
    our_public_key,
    pin,
    pinned_keys,
    unpin,
)

HOST = Host("my4090", "root", "region-9.autodl.com", 12345, jump=("a@b:22",), price_per_hour=2.19, currency="CNY")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its own configuration and home folders; no agent, no keys of whoever runs the tests."""
    for name in ("SSH_AUTH_SOCK", "SOJOURN_SSH_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SOJOURN_CONFIG", str(tmp_path / "config"))
    (tmp_path / "home").mkdir()
    return tmp_path / "config"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_host_is_kept_as_it_was_in_a_file_that_only_its_owner_reads():
    save_host(HOST)
    assert load_hosts() == {"my4090": HOST} and get_host("my4090") == HOST
    assert _mode(hosts_file()) == 0o600 and _mode(config_folder()) == 0o700
    with pytest.raises(UserError, match="already; choose another name, or add --replace"):
        save_host(HOST)
    save_host(replace(HOST, port=1), replace=True)
    assert get_host("my4090").port == 1
    with pytest.raises(UserError, match="no host called 'my4009'; did you mean my4090"):
        get_host("my4009")
    remove_host("my4090")
    with pytest.raises(UserError, match="add one: sojourn host add NAME"):
        get_host("my4090")


@pytest.mark.parametrize("name", ["", "-o", "a b", "a,b", "a/b", "a" * 65, "a\n", "..", "a\0"])
def test_a_name_that_a_command_line_or_a_list_would_misread_is_refused(name: str):
    with pytest.raises(UserError, match="cannot be a host's name"):
        save_host(replace(HOST, name=name))


def test_two_processes_that_add_hosts_at_once_lose_none():
    program = (
        "import sys; from sojourn.remote.hosts import Host, save_host\n"
        "for n in range(15): save_host(Host(sys.argv[1] + str(n), 'root', 'h'))"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, name]) for name in "ab"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: save_host(replace(HOST, name=f"c{n}")), range(15)))
    assert [child.wait() for child in children] == [0, 0]
    assert len(load_hosts()) == 45
    assert not [path for path in config_folder().iterdir() if path.name not in ("hosts.json", ".hosts.json.lock")]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"hosts": []}', b'{"hosts": {"a": 1}}', b'{"hosts": {"a": {"user": "u"}}}', b"\xff",
     b'{"hosts": {"a": {"user": "u", "address": "h", "port": "22"}}}',
     b'{"hosts": {"a": {"user": "u", "address": "h", "transport": "telnet"}}}'],
)  # fmt: skip
def test_a_damaged_file_is_one_line_and_stays_as_it_is(content: bytes):
    config_folder().mkdir()
    hosts_file().write_bytes(content)
    with pytest.raises(UserError, match=r"hosts\.json") as damaged:
        load_hosts()
    assert "\n" not in str(damaged.value) and "correct it, or move it away" in str(damaged.value)
    assert hosts_file().read_bytes() == content
    if content in (b"", b"{", b"[]", b'{"hosts": []}', b"\xff"):  # nor does adding a host write over it
        with pytest.raises(UserError):
            save_host(HOST)
        assert hosts_file().read_bytes() == content


def test_what_a_newer_version_wrote_is_kept():
    config_folder().mkdir()
    hosts_file().write_text('{"later": 1, "hosts": {"a": {"user": "u", "address": "h", "colour": "red"}}}')
    save_host(HOST)
    assert '"later": 1' in hosts_file().read_text() and '"colour": "red"' in hosts_file().read_text()


def test_our_key_is_made_once_and_pins_are_per_address_and_port():
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: our_public_key(), range(4)))) == 1
    assert _mode(our_key()) == 0o600 and _mode(key_path().parent) == 0o700
    assert re.fullmatch(r"ssh-ed25519 \S+ sojourn", our_public_key())
    checked = subprocess.run(["ssh-keygen", "-lf", key_path()], capture_output=True, text=True, check=True).stdout
    assert checked.split()[1] == fingerprint(our_public_key()).split()[0]
    key = " ".join(our_public_key().split()[:2])
    pin("h", 22, [key])
    pin("h", 2222, [key])
    pin("::1", 2222, [key])
    unpin("h", 22)
    assert pinned_keys("h", 22) == [] and pinned_keys("h", 2222) == pinned_keys("::1", 2222) == [key]
    assert (
        known_hosts_path().read_text().startswith(f"[h]:2222 {key}\n[::1]:2222") and _mode(known_hosts_path()) == 0o600
    )


def test_a_secret_comes_from_the_environment_before_the_file_and_never_from_one_that_others_read(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(secrets, "_keyring", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert secrets.get("hf_token") is None
    assert secrets.set("HF-Token", "hf_from_file") == str(secrets.secrets_file())
    assert secrets.get("hf_token") == "hf_from_file" and _mode(secrets.secrets_file()) == 0o600
    monkeypatch.setenv("HF_TOKEN", "hf_plain")
    assert secrets.get("hf_token") == "hf_plain"
    monkeypatch.setenv("SOJOURN_HF_TOKEN", "hf_ours")
    assert secrets.get("hf_token") == "hf_ours" and secrets.where("hf_token") == "the variable SOJOURN_HF_TOKEN"
    monkeypatch.delenv("SOJOURN_HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    secrets.secrets_file().chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        secrets.get("hf_token")
    secrets.secrets_file().chmod(0o600)
    secrets.delete("hf_token")
    with pytest.raises(UserError, match="there is no secret called hf_token"):
        secrets.delete("hf_token")


def test_a_keyring_is_used_where_it_works_and_the_file_where_it_does_not(monkeypatch: pytest.MonkeyPatch):
    kept: dict[tuple[str, str], str] = {}
    ring = types.SimpleNamespace(
        set_password=lambda service, name, value: kept.__setitem__((service, name), value),
        get_password=lambda service, name: kept.get((service, name)),
        delete_password=lambda service, name: kept.pop((service, name)),
    )
    monkeypatch.setattr(secrets, "_keyring", lambda: ring)
    assert secrets.set("runpod_api_key", "rp_12345678") == "the OS keyring"
    assert secrets.get("runpod_api_key") == "rp_12345678" and not secrets.secrets_file().exists()
    secrets.delete("runpod_api_key")
    assert not kept

    def locked(*_: str) -> None:
        raise RuntimeError("locked")

    ring.set_password = locked
    assert secrets.set("runpod_api_key", "rp_12345678") == str(secrets.secrets_file())


def test_redacting_removes_every_known_secret_however_it_is_quoted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "_keyring", lambda: None)
    monkeypatch.setenv("WANDB_API_KEY", "wandb-987654")
    secrets.set("hf_token", 'hf_"a b"/ü')
    text = 'hf_"a b"/ü hf_%22a%20b%22%2F%C3%BC hf_\\"a b\\"/\\u00fc aGZfImEgYiIvw7w= wandb-987654 harmless'
    assert secrets.redact(text) == " ".join(["[secret]"] * 5 + ["harmless"])


def test_a_secret_is_set_from_standard_input_and_no_argument_takes_it():
    runner = CliRunner()
    done = runner.invoke(host_app, ["secret", "set", "autodl_token"], input="canary-token-55\n")
    assert done.exit_code == 0 and "canary" not in done.output and secrets.get("autodl_token") == "canary-token-55"
    assert runner.invoke(host_app, ["secret", "set", "autodl_token", "canary-token-55"]).exit_code == 2
    assert runner.invoke(host_app, ["secret", "delete", "autodl_token"]).exit_code == 0
    assert secrets.get("autodl_token") is None


@pytest.mark.parametrize(
    ("address", "platform"),
    [
        ("region-9.autodl.com", "autodl"),
        ("connect.westb.SeetaCloud.com.", "autodl"),
        ("i-1.gpushare.com", "gpushare"),
        ("hz-4.matpool.com", "matpool"),
        ("workspace.featurize.cn", "featurize"),
        ("ssh4.vast.ai", "vast"),
        ("ssh.runpod.io", "runpod"),
        ("autodl.com.evil.example", None),
        ("10.0.0.1", None),
    ],
)
def test_a_platform_is_recognised_by_its_address(address: str, platform: str | None):
    found = platform_of_address(address)
    assert (found.name if found else None) == platform


def test_a_host_whose_runs_have_no_copy_here_is_not_removed(tmp_path: Path):
    save_host(HOST)
    Job("run1", "my4090", ("my4090",), str(tmp_path), ()).save()
    runner = CliRunner()
    refused = runner.invoke(host_app, ["remove", "my4090"])
    assert "sojourn pull run1" in str(refused.exception) and "my4090" in load_hosts()
    done = runner.invoke(host_app, ["remove", "my4090", "--force"])
    assert done.exit_code == 0 and "is billed until you stop it" in done.output and not load_hosts()
