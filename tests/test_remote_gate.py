"""The supervisor's decisions, each as a table: the shutdown gate, restarts, GPU errors, its specification."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sojourn.remote import gate as laptop
from sojourn.remote.box import supervisor
from sojourn.remote.box.supervisor import after_exit, gate, gpu_error_in, parse_spec
from sojourn.remote.connection import Completed
from sojourn.remote.hosts import Host
from sojourn.remote.job import Job

AUTODL = laptop.disks_of("autodl")
GPUSHARE = laptop.disks_of("gpushare")


def item(*places: dict[str, Any], name: str = "final") -> dict[str, Any]:
    return {"name": name, "places": list(places)}


def on(path: str, verified: bool = True) -> dict[str, Any]:
    return {"kind": "disk", "path": path, "verified": verified, "damage": None if verified else "model is cut short"}


HOME = {"kind": "home", "path": "", "verified": True}
HUB = {"kind": "hub", "path": "hub:me/models", "verified": True}
TMP, FS, HY, NAS = "/root/autodl-tmp/runs/t/final", "/root/autodl-fs/t/final", "/hy-tmp/runs/t/final", "/hy-nas/t/final"


@pytest.mark.parametrize(
    ("platform", "action", "disks", "items", "reason"),
    [
        ("autodl", "power_off", AUTODL, [item(on(TMP))], None),
        ("autodl", "power_off", AUTODL, [item(on("/root/other/final"))], None),  # / survives there
        ("autodl", "power_off", AUTODL, [], None),
        ("autodl", "power_off", AUTODL, None, "could not be read"),
        ("autodl", "power_off", AUTODL, [item(on(TMP, verified=False))], "model is cut short"),
        ("autodl", "power_off", AUTODL, [item(on(TMP, verified=False), on(FS))], None),
        ("autodl", "power_off", AUTODL, [item(on(TMP)), item(name="checkpoints/step-00000040")], "step-00000040"),
        ("autodl", "release", AUTODL, [item(on(TMP))], "does not survive a release"),
        ("autodl", "release", AUTODL, [item(on(TMP), on(FS))], None),
        ("autodl", "release", AUTODL, [item(on(TMP), on(FS, verified=False))], "does not survive a release"),
        ("autodl", "release", AUTODL, [item(on(TMP), HOME)], None),
        ("autodl", "release", AUTODL, [item(on(TMP), HUB)], None),
        ("autodl", "release", AUTODL, [item(on(TMP), {**HUB, "verified": False})], "does not survive a release"),
        ("autodl", "release", AUTODL, [item(on(TMP), HOME), item(on(TMP), name="best")], "best"),
        ("gpushare", "power_off", GPUSHARE, [item(on(HY))], "wiped 24 h after a power-off"),
        ("gpushare", "power_off", GPUSHARE, [item(on(HY), on(NAS))], None),
        ("gpushare", "power_off", GPUSHARE, [item(on(HY), HOME)], None),
        ("gpushare", "power_off", GPUSHARE, [item(on("/root/final"))], "does not survive a power-off"),
        ("kaggle", "power_off", [{"path": "/k", "survives": "session"}], [item(on("/k/f"))], "does not survive"),
        ("autodl", "power_off", [], [item(on(TMP))], "does not survive a power-off"),
        ("autodl", "power_off", [{"path": "/root/autodl-tm", "survives": "stop"}], [item(on(TMP))], "not survive"),
        ("generic", "power_off", AUTODL, [item(on(TMP), HOME)], "unknown platform"),
        ("generic", "release", AUTODL, [], "unknown platform"),
        ("", "power_off", AUTODL, [], "unknown platform"),
        ("autodl", "explode", AUTODL, [], "not an action"),
    ],
)
def test_a_box_goes_only_when_every_checkpoint_and_model_stays_somewhere(
    platform: str, action: str, disks: list[dict[str, Any]], items: list[dict[str, Any]] | None, reason: str | None
) -> None:
    verdict = gate(platform, action, disks, items, "t")
    assert verdict.allowed == (reason is None)
    if reason is not None:
        assert reason in verdict.reason
        assert "\n" not in verdict.reason


def test_the_longest_path_decides() -> None:
    disks = [{"path": "/", "survives": "stop"}, {"path": "/scratch", "survives": "session"},
             {"path": "/scratch/keep", "survives": "release"}]  # fmt: skip
    found = [supervisor.survival(path, disks)["survives"] for path in ("/a", "/scratch/a", "/scratch/keep/a")]
    assert found == ["stop", "session", "release"]
    assert supervisor.survival("/scratch/keeper/a", disks)["survives"] == "session"
    assert supervisor.survival("/scratch/keep/../a", disks)["survives"] == "session"


def test_a_refusal_says_what_to_type() -> None:
    assert gate("autodl", "release", AUTODL, [item(on(TMP))], "my-run").reason == (
        "final lies only in /root/autodl-tmp/runs/t/final, which does not survive a release; "
        "on your laptop, type: sojourn pull my-run --what all"
    )


def test_copies_at_home_count_only_when_every_byte_is_the_same(tmp_path: Path) -> None:
    model = tmp_path / "run/final"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    known = {**item(on(TMP)), "digest": supervisor.digest_of(supervisor.hash_files(model))}
    copies = laptop.copies_at_home([known], tmp_path / "run")
    assert copies == {"final": known["digest"]}
    assert json.loads(laptop.pulled_record(copies)) == {"verified": copies}
    assert gate("autodl", "release", AUTODL, laptop.with_home_copies([known], copies)).allowed
    assert not gate("autodl", "release", AUTODL, laptop.with_home_copies([known], {})).allowed
    (model / "model.safetensors").write_bytes(b"Weights")
    assert laptop.copies_at_home([known], tmp_path / "run") == {}


class BoxHere:
    """A box that is this machine."""

    def run(self, argv: list[str], input: bytes) -> Completed:
        done = subprocess.run([sys.executable, *argv[1:]], input=input, capture_output=True, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)


def test_the_laptop_asks_the_box_and_compares_with_its_own_copies(tmp_path: Path) -> None:
    model = tmp_path / "box/runs/t/final"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    content = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (model / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + b"w")
    host = Host("b", "root", "box", platform="autodl", home=str(tmp_path / "box"))
    job = Job("t", "b", ("b",), str(tmp_path / "home/t"), ())
    assert laptop.check_gate(BoxHere(), host, [job], "power_off") is None
    refused = laptop.check_gate(BoxHere(), host, [job], "release")
    assert refused is not None
    assert refused.endswith("does not survive a release; on your laptop, type: sojourn pull t --what all")
    shutil.copytree(model, tmp_path / "home/t/final")
    assert laptop.check_gate(BoxHere(), host, [job], "release") is None
    (tmp_path / "home/t/final/model.safetensors").write_bytes(b"cut")
    assert laptop.check_gate(BoxHere(), host, [job], "release") == refused
    (model / "model.safetensors").write_bytes(b"cut")
    damaged = laptop.check_gate(BoxHere(), host, [job], "power_off")
    assert damaged is not None
    assert "final has no verified copy (model.safetensors is not whole)" in damaged
    generic = laptop.check_gate(BoxHere(), replace(host, platform="generic"), [job], "power_off")
    assert generic is not None
    assert "unknown platform" in generic
    nowhere = laptop.check_gate(BoxHere(), replace(host, home=str(tmp_path / "none")), [job], "release")
    assert nowhere is None  # nothing is there to lose


TRAIN, PREPARE = True, False


@pytest.mark.parametrize(
    ("code", "asked", "phase", "restarts", "gpu", "expected"),
    [
        (0, None, TRAIN, 0, None, ("next", "")),
        (0, "budget", TRAIN, 0, None, ("next", "")),  # it finished just in time
        (0, None, TRAIN, 0, "Xid 79", ("next", "")),
        (1, None, TRAIN, 0, None, ("restart", "crash")),
        (1, None, TRAIN, 2, None, ("restart", "crash")),
        (1, None, TRAIN, 3, None, ("failed", "crash")),
        (137, None, TRAIN, 0, None, ("restart", "crash")),
        (None, None, TRAIN, 0, None, ("restart", "crash")),
        (1, None, PREPARE, 0, None, ("failed", "crash")),
        (2, None, TRAIN, 0, None, ("failed", "input")),
        (3, None, TRAIN, 0, None, ("stopped", "limit")),
        (127, None, TRAIN, 0, None, ("failed", "start")),
        (3, "budget", TRAIN, 0, None, ("stopped", "budget")),
        (137, "deadline", TRAIN, 0, None, ("stopped", "deadline")),
        (1, "disk", TRAIN, 0, None, ("stopped", "disk")),
        (137, "stall", TRAIN, 0, None, ("restart", "stall")),
        (137, "stall", TRAIN, 3, None, ("failed", "stall")),
        (1, None, TRAIN, 0, "uncorrectable ECC", ("failed", "gpu")),
        (3, "gpu", TRAIN, 0, None, ("failed", "gpu")),
        (3, "stop", TRAIN, 0, "uncorrectable ECC", ("stopped", "stop")),
    ],
)
def test_what_follows_the_end_of_a_phase(
    code: int | None, asked: str | None, phase: bool, restarts: int, gpu: str | None, expected: tuple[str, str]
) -> None:
    assert after_exit(code, asked, phase, restarts, 3, gpu) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.", True),
        ("NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus.", True),
        ("[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has stopped", True),
        ("[12.3] NVRM: Xid (PCI:0000:3b:00): 48, DBE", True),
        ("[12.3] NVRM: Xid (PCI:0000:5e:00): 48, DBE", False),  # another tenant's
        ("[12.3] NVRM: Xid (PCI:0000:3b:00): 31, MMU fault", False),  # the program's own
        ("[12.3] NVRM: Xid (PCI:0000:3b:00): 45, killed", False),
        ("CUDA out of memory. Tried to allocate 79 MiB", False),
        ("step 79/100 · loss 48.0", False),
    ],
)
def test_gpu_errors_are_told_from_a_program_s_own(text: str, found: bool) -> None:
    assert (gpu_error_in(f"step 1\n{text}\n", ["00000000:3B:00.0"]) is not None) == found


GOOD = {
    "version": 1,
    "run": "t",
    "home": "/h",
    "job": "/j",
    "run_folder": "/r",
    "phases": [{"name": "a", "argv": ["b"]}],
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"run": ""}, "run: ''"),
        ({"phases": []}, "phases: []"),
        ({"phases": [{"name": "../x", "argv": ["b"]}]}, "phases[0].name"),
        ({"phases": [{"name": "a", "argv": "ls -l"}]}, "phases[0].argv"),
        ({"phases": GOOD["phases"] * 2}, "same name"),
        ({"version": 2}, "version 1"),
        ({"budget": 10}, "budget: needs price_per_hour"),
        ({"price_per_hour": "2.19"}, "price_per_hour: '2.19'"),
        ({"grace_seconds": -1}, "grace_seconds: -1"),
        ({"deadline": True}, "deadline: True"),
        ({"notify": {}}, "notify: {}"),
    ],
)
def test_a_wrong_specification_is_one_line_with_the_key(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(supervisor.SpecError) as error:
        supervisor.read_spec(tmp_path / "spec.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["run", "home", "run_folder", "phases"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(supervisor.SpecError, match=f"^{key}: missing$"):
        parse_spec(json.dumps({name: value for name, value in GOOD.items() if name != key}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 1'])
def test_a_damaged_specification_is_a_one_line_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(data)
    argv = [sys.executable, supervisor.__file__, "start", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "spec.json" in done.stderr


def test_the_last_save_fits_into_the_budget() -> None:
    assert supervisor.budget_threshold(20.0, 3.6, 60) == pytest.approx(20 - 0.06)
    assert supervisor.budget_threshold(0.1, 36, 600) == pytest.approx(0.09)  # never less than nine tenths


def test_setting_the_clock_changes_neither_cost_nor_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wall = 1_700_000_000.0
    monkeypatch.setattr(supervisor.time, "time", lambda: wall)
    spec = parse_spec(json.dumps({**GOOD, "price_per_hour": 3600.0, "budget": 50, "deadline": wall + 1000,
                                  "min_free_bytes": 0}).encode())  # fmt: skip
    watch = supervisor.Supervisor(tmp_path, spec, signals=[])
    for jump in (1e6, -1e6, 0.0):
        monkeypatch.setattr(supervisor.time, "time", lambda jump=jump: wall + jump)
        watch.heartbeat()
        assert watch.find_limit() is None
    assert 0 <= watch.state["seconds"] < 50


def test_the_supervisor_needs_python_3_8_and_its_library_only() -> None:
    """Syntax by the grammar of 3.8; names by a list of what came later."""
    later = {"removeprefix", "removesuffix", "is_relative_to", "readlink", "waitstatus_to_exitcode", "randbytes",
             "file_digest",
             "pidfd_send_signal", "cancel_futures", "process_group", "hardlink_to", "bit_count"}  # fmt: skip
    source = Path(supervisor.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords if word.arg}
    assert not used & later
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {
        node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported <= set(sys.stdlib_module_names)


def test_the_laptop_may_be_windows() -> None:
    """Without fcntl, fork and signals of POSIX the decisions still import."""
    code = """
import os, signal, sys
sys.modules["fcntl"] = None
for name in ("fork", "setsid", "sysconf", "memfd_create", "sync"): delattr(os, name)
for name in ("SIGKILL", "SIGHUP"): delattr(signal, name)
from sojourn.remote import gate
print(gate.gate("generic", "power_off", [], [], "t").allowed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.stdout == "False\n", done.stderr
