"""Our own wheel: built here without network, installed there by pip."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sojourn
from sojourn.errors import UserError
from sojourn.remote.wheel import build_wheel, requirements, wheel_digest, wheel_metadata


def test_pip_installs_our_wheel_into_a_fresh_environment_and_the_command_works(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "env"], check=True
    )
    python = tmp_path / "env/bin/python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "parent.pth").write_text(f"import site; site.addsitedir({str(Path(pytest.__file__).parents[1])!r})\n")
    pip = [python, "-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel]
    subprocess.run(pip, check=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"})
    shown = subprocess.check_output(
        [tmp_path / "env/bin/sojourn", "--version"], text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert shown.strip() == f"sojourn {sojourn.__version__}"
    where = [python, "-I", "-c", "import sojourn; print(sojourn.__file__)"]
    assert subprocess.check_output(where, text=True).startswith(str(site))


def test_the_wheel_has_the_extras_the_data_files_and_no_caches(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert "sojourn/catalog/platforms.toml" in names and "sojourn/remote/box/probe.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    headers = wheel_metadata(wheel)
    assert "Provides-Extra: train" in headers and "Provides-Extra: hopper" in headers
    needs = requirements(headers, "train")
    assert "torch>=2.6" in needs and "pydantic>=2.7" in needs
    assert not [need for need in needs if "extra" in need or need.startswith(("deepspeed", "pytest"))]
    assert "torch>=2.6" not in requirements(headers)


def test_the_same_code_gives_the_same_bytes_and_a_change_another_digest(tmp_path: Path) -> None:
    first = build_wheel(tmp_path / "a")
    assert first.read_bytes() == build_wheel(tmp_path / "b").read_bytes()
    package = tmp_path / "checkout/src/sojourn"
    shutil.copytree(Path(sojourn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    root = Path(sojourn.__file__).parents[2]
    shutil.copy(root / "pyproject.toml", tmp_path / "checkout")
    assert wheel_digest(build_wheel(tmp_path / "c", package)) == wheel_digest(first)
    (package / "errors.py").write_text("changed = True\n")
    assert wheel_digest(build_wheel(tmp_path / "c", package)) != wheel_digest(first)


def test_an_installed_package_becomes_a_wheel_again(tmp_path: Path) -> None:
    """Outside a checkout the description comes from what pip installed."""
    package = tmp_path / "site-packages/sojourn"
    shutil.copytree(Path(sojourn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    headers = wheel_metadata(build_wheel(tmp_path, package))
    assert "Name: sojourn\n" in headers and "Provides-Extra: train" in headers


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="our wheel cannot be written"):
        build_wheel(tmp_path / "file")
