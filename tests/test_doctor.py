"""The doctor: real operations, a mending line for what is wrong, no traceback, no need of torch."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import needs_fork
from sojourn.machine import probe_disk, probe_platform, probe_software, probe_torch
from sojourn.machine.doctor import examine, exit_code, next_step
from sojourn.machine.finding import Finding, guarded
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.platform import detect

RUN = "import typer; from sojourn.cli.doctor import doctor; app = typer.Typer(); app.command()(doctor); app()"
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def cli(*words: str, code: str = RUN, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    whole = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=whole, check=False)


def named(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_folder_that_others_put_things_into_is_no_package(tmp_path, monkeypatch):
    """FlashAttention-4 is `flash_attn.cute`, without the `flash_attn` that the second version is."""
    (tmp_path / "made_up_package" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not probe_software.importable("made_up_package") and not probe_software.importable("no_such_package")
    (tmp_path / "made_up_package" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert probe_software.importable("made_up_package")


@needs_fork
def test_json_is_one_object_with_platform_findings_and_summary(tmp_path, fork_server):
    done = fork_server.run("doctor", "--json", "--home", str(tmp_path))
    told = json.loads(done.stdout)
    assert told["platform"]["name"] and told["home"] == str(tmp_path)
    names = [finding["name"] for finding in told["findings"]]
    assert len(names) == len(set(names))
    assert {"python", "platform", "cpu", "ram", "torch", "libraries", "disk", "clock", "session"} <= set(names)
    assert set(told["summary"]) == {"ok", "warn", "fail", "exit_code", "next"}
    assert done.returncode == told["summary"]["exit_code"] == (1 if told["summary"]["fail"] else 0)


@pytest.fixture(scope="module")
def piped(tmp_path_factory, fork_server):
    """What a pipe gets over SSH, where the user's catalogue is broken."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "sojourn").mkdir()
    (folder / "sojourn/catalog.toml").write_text("[gpux.a]\n")
    env = {"COLUMNS": "80", "SSH_TTY": "/dev/pts/0", "TMUX": "", "STY": "", "SOJOURN_HOME": ""}
    return fork_server.run("doctor", "--home", str(folder), env={**os.environ, **env, "XDG_CONFIG_HOME": str(folder)})


@needs_fork
def test_a_pipe_gets_one_whole_line_a_finding_and_no_colours(piped):
    assert "\x1b" not in piped.stdout and not piped.stderr
    *lines, blank, summary = piped.stdout.splitlines()
    assert blank == "" and "Next: " in summary
    assert all(line[:4].strip() in ("ok", "warn", "fail") or line.strip().startswith("fix: ") for line in lines)
    assert any("over SSH without tmux" in line for line in lines)


def test_without_torch_the_doctor_works_and_tells_how_to_get_it(tmp_path):
    done = cli("--json", "--home", str(tmp_path), code=BLOCKED + RUN, env={"PATH": ""})
    assert "Traceback" not in done.stderr
    told = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert told["torch"]["level"] == "warn" and "sojourn[train]" in told["torch"]["fix"]
    assert "precision" not in told and told["disk"]["level"] in ("ok", "warn")


def test_a_laptop_without_a_gpu_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = named(examine(tmp_path, env={}, root=tmp_path))
    assert found["gpu"].level == "ok" and "sojourn plan" in found["gpu"].message
    assert found["torch"].level == "ok"


def test_the_chosen_precision_and_attention_are_proved_by_doing_them(tmp_path):
    torch = pytest.importorskip("torch")
    found = named(examine(tmp_path, env={}, root=tmp_path))
    assert found["precision"].level == "ok"
    assert all(error < 2e-2 for error in found["precision"].data["relative_error"].values())
    assert "math" in found["attention"].data["worked"]
    assert found["attention"].data["used"] in found["attention"].data["worked"]
    assert probe_torch.matmul_error(torch, "cpu", "fp32") < 1e-5


def test_a_device_with_wrong_matmuls_fails(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(probe_torch, "matmul_error", lambda *_: float("nan"))
    found = probe_torch.precision(torch)
    assert found.level == "fail" and "wrong matmuls" in found.message


T4 = DetectedGpu(0, "Tesla T4", 16 * 1024**3, 0, (7, 5), "550.54", (12, 4), "nvidia-smi")


def test_a_cpu_build_of_torch_beside_a_gpu_fails_with_the_build_to_install():
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("needs a CPU build of torch")
    found = probe_torch.build(probe_torch.Torch(torch), [T4])
    assert found.level == "fail" and "Tesla T4" in found.message
    assert found.fix and found.fix.endswith("https://download.pytorch.org/whl/cu126")


def test_torch_missing_or_broken_beside_a_gpu_fails():
    assert probe_torch.build(probe_torch.Torch(None), [T4]).level == "fail"
    broken = probe_torch.build(probe_torch.Torch(None, "OSError: libcudart.so.12"), [T4])
    assert broken.level == "fail" and "libcudart" in broken.message


def test_installing_a_missing_library_never_replaces_the_torch_that_is_there(monkeypatch):
    versions = {"torch": "2.7.1+cu128", "transformers": "4.50.0", "peft": None}
    monkeypatch.setattr(probe_software, "installed", lambda name: versions.get(name, "99.0"))
    found = probe_software.libraries(torch_here=True)
    assert found.level == "fail"
    assert found.fix == "pip install 'torch==2.7.1+cu128' 'transformers>=5.3,<6' 'peft>=0.17'"
    assert probe_software.libraries(torch_here=False).level == "warn"


def test_the_floors_are_those_of_the_package():
    toml = pytest.importorskip("tomllib")
    project = toml.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["train"]
    assert {name + bounds for name, bounds in probe_software.REQUIRED.items()} <= set(extra)


def test_version_ranges():
    assert probe_software.satisfies("5.10.0", ">=5.3,<6")
    assert probe_software.satisfies("2.6.0a0+df5bbc09d1.nv24.11", ">=2.6")
    assert not probe_software.satisfies("6.0.0", ">=5.3,<6")
    assert not probe_software.satisfies("2.5.1+cu124", ">=2.6")


def test_a_home_that_is_a_file_fails_with_the_mend(tmp_path):
    (tmp_path / "home").write_text("not a folder")
    found = named(probe_disk.disks(tmp_path / "home" / "runs", {}))["disk"]
    assert found.level == "fail" and "is a file" in found.message and "SOJOURN_HOME" in (found.fix or "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc cannot be written even by root")
def test_a_folder_that_cannot_be_written_fails_with_the_mend():
    found = named(probe_disk.disks(Path("/proc/self"), {}))["disk"]
    assert found.level == "fail" and "cannot be written" in found.message and "SOJOURN_HOME" in (found.fix or "")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount of its own")
def test_a_full_disk_fails_with_the_mend(tmp_path):
    code = "import json; from pathlib import Path; from sojourn.machine.probe_disk import disks\n"
    code += f"print(json.dumps([[f.name, f.level, f.message, f.fix] for f in disks(Path({str(tmp_path)!r}), {{}})]))"
    script = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    name, level, message, fix = json.loads(done.stdout)[0]
    assert (name, level) == ("disk", "fail") and "is full" in message and "SOJOURN_HOME" in fix


def test_the_disk_probe_leaves_nothing_behind(tmp_path):
    assert probe_disk.write_and_read(tmp_path, 4096) > 0
    assert probe_disk.clock(tmp_path).level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_small_shared_memory_is_a_warning(tmp_path, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("shared memory is looked at on Linux")
    small = probe_disk.volume(tmp_path).__class__(tmp_path, 0, 64 * 1024**2, 64 * 1024**2, None, None)
    monkeypatch.setattr(probe_disk, "volume", lambda _: small)
    (found,) = probe_disk.shared_memory(tmp_path)
    assert found.level == "warn" and "shm-size" in (found.fix or "")


def test_runs_on_a_path_that_is_wiped_fail_with_the_path_that_survives(tmp_path):
    (tmp_path / "kaggle/working").mkdir(parents=True)
    here = detect({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, tmp_path)
    found = probe_platform.persistence(here, tmp_path / "tmp/runs", tmp_path)
    assert found.level == "fail" and found.fix == f"export SOJOURN_HOME={tmp_path / 'kaggle/working'}"
    assert probe_platform.persistence(here, tmp_path / "kaggle/working", tmp_path).level == "ok"
    assert "12 h a session" in probe_platform.platform_limits(here).message


def test_colab_without_drive_warns_and_tells_how_to_mount_it(tmp_path):
    (tmp_path / "content").mkdir()
    here = detect({"COLAB_GPU": "1"}, tmp_path)
    found = probe_platform.persistence(here, tmp_path / "content", tmp_path)
    assert found.level == "warn" and "drive.mount" in (found.fix or "")


def test_a_chinese_rental_is_told_of_the_mirror_and_network_turbo(tmp_path):
    (tmp_path / "root/autodl-tmp").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/network_turbo").write_text("")
    here = detect({}, tmp_path)
    found = probe_platform.mirrors(here, {"HOME": str(tmp_path)}, tmp_path)
    assert found.level == "warn" and "HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1" in (found.fix or "")
    assert "source /etc/network_turbo" in (found.fix or "")
    env = {"HOME": str(tmp_path), "HF_ENDPOINT": "https://hf-mirror.com"}
    assert probe_platform.mirrors(here, env, tmp_path).fix == "export HF_HUB_DISABLE_XET=1"
    assert probe_platform.mirrors(here, {**env, "HF_HUB_DISABLE_XET": "1"}, tmp_path).level == "ok"


def test_tokens_and_passwords_are_never_shown(tmp_path):
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip/pip.conf").write_text("[global]\nindex-url = https://me:hf_secret@pip.example.org/simple\n")
    for env in ({"HF_TOKEN": "hf_secret"}, {"HF_HOME": str(tmp_path)}):
        found = probe_platform.token(env)
        assert found.data == {"present": True} and "hf_secret" not in str(found)
    found = probe_platform.mirrors(detect({}, tmp_path), {"HOME": str(tmp_path)}, tmp_path)
    assert "pip.example.org" in found.message and "hf_secret" not in str(found)


def test_ssh_without_tmux_warns_and_with_it_does_not():
    assert probe_platform.session({"SSH_CONNECTION": "1 2 3 4"}).level == "warn"
    assert (
        probe_platform.session({"SSH_CONNECTION": "1 2 3 4", "PATH": ""}).fix
        == "nohup sojourn train RUN > train.log 2>&1 &"
    )
    assert probe_platform.session({"SSH_CONNECTION": "1 2 3 4", "TMUX": "socket"}).level == "ok"
    assert probe_platform.session({}).level == "ok"


def test_a_probe_that_raises_or_hangs_becomes_one_finding():
    def broken() -> Finding:
        raise RuntimeError("the first line\nand more")

    assert guarded("x", broken) == [Finding("x", "fail", "RuntimeError: the first line")]
    import threading

    never = threading.Event()
    (found,) = guarded("y", lambda: Finding("y", "ok", str(never.wait())), seconds=0.01)
    assert found.level == "fail" and "timed out" in found.message
    never.set()


@pytest.mark.skipif(sys.platform != "linux", reason="the user's file is elsewhere there")
@needs_fork
def test_a_broken_catalogue_of_the_users_is_a_finding_not_a_traceback(piped):
    assert piped.returncode == 1 and "unknown table [gpux]" in piped.stdout and "Traceback" not in piped.stderr


def test_any_failure_makes_the_exit_code_1_and_the_summary_says_what_to_do():
    fine, bad = Finding("a", "ok", ""), Finding("b", "fail", "")
    assert exit_code([fine]) == 0 and next_step([fine]) == "sojourn demo"
    assert exit_code([fine, bad]) == 1 and "fix" in next_step([fine, bad])


@pytest.mark.parametrize("width", [30, 48, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    import io

    from rich.console import Console

    from sojourn.cli.doctor import _show
    from sojourn.machine.finding import Finding

    words = "some words that are long enough for several lines of a terminal " * 3
    findings = [Finding("persistent storage", "warn", words, words), Finding("gpu", "ok", words)]
    shown = io.StringIO()
    _show(findings, Console(file=shown, width=width, force_terminal=True, color_system=None), words)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) < width and "".join(shown.getvalue().split()).count(words.replace(" ", "")) == 4
