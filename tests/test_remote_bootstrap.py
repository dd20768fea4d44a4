"""Bootstrap: our environment beside the image's torch, on scratch folders with real venvs and a real pip."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_box import TORCH, LocalBox, make_image, make_index, make_wheel, serve
from sojourn.catalog.platforms import platforms
from sojourn.errors import RunFailed, UserError
from sojourn.remote import bootstrap as module
from sojourn.remote import box_network
from sojourn.remote.bootstrap import bootstrap, no_gpu_advice
from sojourn.remote.box_facts import BoxFacts, probe
from sojourn.remote.hosts import Host
from sojourn.remote.image_python import choose_python, is_complete

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a box runs Linux")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image's Python in a venv such as /opt/venv, with torch 2.6.0+cu124 and pip. Nothing may change it."""
    return make_image(tmp_path_factory.mktemp("image") / "venv")


@pytest.fixture
def box(tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBox]:
    """With an index that has `plain`, and two versions of `needs-torch`, the newer of which wants torch 2.7."""
    wheels = [
        make_wheel(tmp_path / "w", "plain", "1.0", code="value = 7"),
        make_wheel(tmp_path / "w", "needs-torch", "1.0", ["torch>=2.0", "plain"]),
        make_wheel(tmp_path / "w", "needs-torch", "2.0", ["torch>=2.7", "plain"]),
        make_wheel(tmp_path / "w", "only-new", "1.0", ["torch>=2.7"]),
        make_wheel(tmp_path / "w", "torch", "2.9.0", code=TORCH.format(version="2.9.0")),
    ]
    make_index(tmp_path / "index", wheels)
    want(monkeypatch, "plain>=1", "needs-torch")
    monkeypatch.setattr(module, "probe", only(image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve(tmp_path / "index") as url:
        monkeypatch.setattr(box_network, "PYPI", f"{url}/simple")
        monkeypatch.setattr(box_network, "HUB", url)
        yield LocalBox(tmp_path / "box", image)


def only(*pythons: Path):  # type: ignore[no-untyped-def]
    """A probe that does not see this machine's own Pythons."""

    def look(box: LocalBox, home: str = "", **options: bool) -> BoxFacts:
        found = probe(box, home, **options).found
        rows = {row["path"]: row for row in found["pythons"]}
        return BoxFacts({**found, "uv": None, "conda": None, "pythons": [rows[str(path)] for path in pythons]})

    return look


def want(monkeypatch: pytest.MonkeyPatch, *needs: str) -> None:
    monkeypatch.setattr(module, "requirements", lambda headers, extra: ["torch>=2.6", *needs])


def content(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in files}


def python_says(python: str, code: str) -> str:
    return subprocess.check_output([python, "-c", code], text=True, env={"PATH": "/usr/bin:/bin"}).strip()


def test_what_is_missing_is_installed_beside_the_images_torch_which_stays_as_it_is(
    box: LocalBox, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lines = content(image.parents[1]), list[str]()
    configuration = box.folder / "user/.config/pip/pip.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text(f"[global]\nindex-url = {box_network.PYPI.replace('//', '//me:canary-7391@')}\n")
    made = bootstrap(box, box.host, lines.append)
    assert made.torch == "2.6.0+cu124" and made.cuda_available and made.base == str(image)
    assert made.installed == ("needs_torch 1.0", "plain 1.0")  # 2.0 wants a newer torch
    assert content(image.parents[1]) == before
    assert python_says(made.python, "import torch; print(torch.__file__)") == str(
        next(image.parents[1].glob("lib/python3*/site-packages/torch/__init__.py"))
    )
    assert python_says(made.python, "import plain, sojourn; print(plain.value, sojourn.__file__)").startswith(
        "7 " + box.host.home
    )
    assert any("2.6.0+cu124 (CUDA 12.4)" in line for line in lines) and any("(its own)" in line for line in lines)
    files = [path for path in box.folder.rglob("*") if path.is_file() and path != configuration]
    assert not [path for path in files if b"canary-7391" in path.read_bytes()], "the index's password stays where it is"

    box.commands.clear()
    again = bootstrap(box, box.host, lines.append)
    assert (again.python, again.fresh, again.installed, again.env) == (made.python, False, made.installed, made.env)
    assert len(box.commands) == 1, "one short command when nothing changed"

    # New code of ours needs neither pip nor network, and does not disturb a job that runs from the old environment.
    job = Path(box.host.home, ".sojourn/jobs/run/spec.json")
    job.parent.mkdir(parents=True)
    job.write_text(json.dumps({"phases": [{"argv": [made.python, "-m", "sojourn"]}]}))
    monkeypatch.setattr(module, "wheel_digest", lambda wheel: "e" * 64)
    newer = bootstrap(box, box.host, lines.append)
    assert newer.python != made.python and newer.installed == made.installed
    assert not any("network" in command for command in box.commands)
    assert Path(box.host.home, ".sojourn/env").resolve() == Path(newer.python).parents[1]
    assert python_says(made.python, "import plain; print(plain.value)") == "7"
    job.unlink()
    monkeypatch.setattr(module, "wheel_digest", lambda wheel: "f" * 64)
    newest = bootstrap(box, box.host, lines.append)
    assert not Path(made.python).exists() and not Path(newer.python).exists(), "what nothing uses is removed"
    assert python_says(newest.python, "import plain; print(plain.value)") == "7"


def test_a_package_that_wants_another_torch_is_refused_with_one_line(
    box: LocalBox, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want(monkeypatch, "only-new")
    before = content(image.parents[1])
    with pytest.raises(UserError, match=r"no versions fit .* beside the image's torch.*log there: .*\.log") as error:
        bootstrap(box, box.host, lambda line: None)
    assert "\n" not in str(error.value) and "torch==2.6.0+cu124" in str(error.value)
    assert content(image.parents[1]) == before
    assert not Path(box.host.home, ".sojourn/env").exists()


@pytest.mark.slow
def test_an_image_without_torch_gets_one_only_when_asked(
    box: LocalBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a home with a space in its name."""
    bare = make_image(tmp_path / "bare", torch=None)
    monkeypatch.setattr(module, "probe", only(bare))
    want(monkeypatch, "needs-torch")
    box = LocalBox(tmp_path / "a box", bare)
    with pytest.raises(UserError, match="--install-torch"):
        bootstrap(box, box.host, lambda line: None)
    made = bootstrap(box, box.host, lambda line: None, install_torch=True)
    assert made.torch == "2.9.0" and made.installed == ("needs_torch 2.0", "plain 1.0", "torch 2.9.0")
    assert not bootstrap(box, box.host, lambda line: None).fresh


def test_without_internet_the_laptop_downloads_what_is_missing_for_the_box(
    box: LocalBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", box_network.PYPI)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(box_network, "PYPI", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(box_network, "HUB", "http://127.0.0.1:9")
    lines: list[str] = []
    made = bootstrap(box, box.host, lines.append)
    assert made.installed == ("needs_torch 1.0", "plain 1.0") and made.torch == "2.6.0+cu124"
    shipped = sorted(path.name for path in Path(box.host.home, ".sojourn/wheels").glob("*/*.whl"))
    assert shipped == ["needs_torch-1.0-py3-none-any.whl", "plain-1.0-py3-none-any.whl"]
    assert any("no package index answers" in line for line in lines)
    assert "models have to travel" in made.warnings[0]


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_installs_the_same_as_pip_and_leaves_torch_alone(
    box: LocalBox, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a venv, uv by itself does not see the image's torch and would install another."""
    with_uv = only(image)

    def look(box: LocalBox, home: str = "", **options: bool) -> BoxFacts:
        return BoxFacts({**with_uv(box, home, **options).found, "uv": shutil.which("uv")})

    monkeypatch.setattr(module, "probe", look)
    monkeypatch.setattr(box, "env", {"UV_FIND_LINKS": "", "UV_INDEX_STRATEGY": "first-index"})
    lines: list[str] = []
    made = bootstrap(box, box.host, lines.append)
    assert made.installed == ("needs_torch 1.0", "plain 1.0") and made.torch == "2.6.0+cu124"
    assert any("installing 2 packages with uv" in line for line in lines)


@pytest.mark.slow
def test_a_second_start_joins_and_a_killed_installation_is_recognised_and_made_again(
    box: LocalBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is cut after `start`, which is repeated; then the installer dies before its layer is complete."""
    real, started, killed = module._ask, [], []

    def ask(box, arguments, python, script=b""):  # type: ignore[no-untyped-def]
        if "start" in arguments and not started:
            started.append(real(box, arguments, python, script))
        if "wait" in arguments and not killed:
            killed.append(find_process(arguments[arguments.index("wait") + 2] + ".spec"))
            os.kill(killed[0], signal.SIGKILL)
        return real(box, arguments, python, script)

    monkeypatch.setattr(module, "_ask", ask)
    made = bootstrap(box, box.host, lambda line: None)
    assert started[0]["state"] == "started" and killed
    assert made.installed == ("needs_torch 1.0", "plain 1.0")


def find_process(word: str) -> int:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if "start\0" in (text := file.read_text()) and word in text:
                    return int(file.parent.name)
            except OSError:
                continue
    raise AssertionError("no installer is running")


def test_images_that_cannot_be_used_are_one_line_that_says_what_to_do(tmp_path: Path, image: Path) -> None:
    box = LocalBox(tmp_path, image)
    facts = only(image)(box, box.host.home, packages=True)

    def changed(**row: object) -> BoxFacts:
        return BoxFacts({**facts.found, "pythons": [{**facts.pythons[0], **row}]})

    with pytest.raises(UserError, match=r"none of its Pythons has torch \(.*--install-torch \(downloads about 3 GB"):
        choose_python(changed(torch=None), box.host)
    with pytest.raises(UserError, match=r"its torch is 2\.1\.0.*needs 2\.6 or newer"):
        choose_python(changed(torch={"version": "2.1.0"}), box.host)
    with pytest.raises(
        UserError, match=r"this image has: 3\.8; rent it with a newer image, or make one there: conda create"
    ):
        choose_python(changed(version=[3, 8, 10]), box.host)
    old = changed(version=[3, 8, 10])
    old.found["conda"] = "/root/miniconda3/bin/conda"
    with pytest.raises(UserError, match=r"--install-torch: conda makes Python 3\.12"):
        choose_python(old, box.host)
    made = choose_python(old, box.host, install_torch=True)
    assert made.make_python == {"name": "conda", "path": "/root/miniconda3/bin/conda", "version": "3.12"}
    nightly = choose_python(changed(torch={"version": "2.6.0a0+df5bbc09d1.nv24.11", "cuda": "12.6"}), box.host)
    assert nightly.torch is not None, "NVIDIA's own builds count as the release that they lead to"


def test_an_image_that_has_everything_needs_no_pip(tmp_path: Path) -> None:
    row = {"version": [3, 10, 12], "platform": "linux-x86_64", "packages": {"pyyaml": "6.0.2", "transformers": "5.4.0"}}
    assert is_complete(["PyYAML>=6.0", "transformers>=5.3,<6", "pywin32; sys_platform == 'win32'"], row)
    assert not is_complete(["tomli>=2.0; python_version < '3.11'"], row)
    assert not is_complete(["transformers>=5.5"], row) and not is_complete(["PyYAML~=6.0"], row)


def test_the_fastest_index_and_a_hub_that_answers_are_chosen() -> None:
    measured = {
        "indexes": {"https://a/simple": 0.9, "own": 1.0, "https://b/simple": None},
        "own_host": "m.cn",
        "hf_endpoint": None,
    }
    mirror = "https://hf-mirror.com"
    chosen = box_network.choose({**measured, "hubs": {box_network.HUB: None, mirror: 0.4}})
    assert chosen.indexes == ("own", "https://a/simple")
    assert chosen.env == {"HF_ENDPOINT": mirror, "HF_HUB_DISABLE_XET": "1"}
    assert chosen.message == "packages from m.cn (its own) 1.0 s, a 0.9 s (no answer: b); models from hf-mirror.com"
    assert box_network.choose({**measured, "hubs": {box_network.HUB: 0.5, mirror: 0.1}}).env == {}
    assert box_network.choose({**measured, "hubs": {box_network.HUB: 2.9, mirror: 0.5}}).env["HF_ENDPOINT"] == mirror
    none = box_network.choose(
        {"indexes": {"https://a": None}, "own_host": None, "hf_endpoint": None, "hubs": {box_network.HUB: None}}
    )
    assert none.indexes == () and none.warning is not None


def test_a_home_that_is_read_only_is_one_line(box: LocalBox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, data: bytes, mode: int = 0o644) -> None:
        raise RunFailed(f"{path}: Read-only file system")

    monkeypatch.setattr(box, "write_bytes", refuse)
    with pytest.raises(UserError, match=r"box: .*data cannot be written: .*Read-only file system") as error:
        bootstrap(box, box.host, lambda line: None)
    assert "\n" not in str(error.value)


def test_the_no_gpu_mode_is_explained_where_it_would_save_money() -> None:
    autodl = next(row for row in platforms() if row.name == "autodl")
    host = Host("box", "root", "x", price_per_hour=2.19, currency="CNY")
    line = no_gpu_advice(autodl, host, gpus=1, minutes=20)
    assert line is not None and "0.73 CNY with the GPU" in line and "no-GPU mode" in line and "0.03 CNY" in line
    assert no_gpu_advice(autodl, host, gpus=0, minutes=20) is None
    generic = next(row for row in platforms() if row.name == "generic")
    assert no_gpu_advice(generic, host, gpus=1, minutes=20) is None


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_the_files_for_the_box_run_on_the_oldest_and_the_newest_python(version: str, tmp_path: Path) -> None:
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    if found[0] is None:
        pytest.skip(f"no Python {version} here")
    python = found[0]
    folder = Path(module.__file__).parent / "box"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import layers, packages, install, probe"
    subprocess.run([python, "-W", "error", "-c", code, str(folder)], check=True)
    probed = subprocess.run(
        [python, "-", "{}"], stdin=(folder / "probe.py").open(), capture_output=True, text=True, check=True
    )
    assert json.loads(probed.stdout.split("SOJOURN-PROBE ")[1])["python"].endswith(tuple("0123456789n"))
