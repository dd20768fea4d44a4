"""What pip adds to the image's Python: a venv that sees the image's packages, with torch pinned (see layers.py)."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from typing import Any

from install import ours, own_index, use_proxies, write_json  # type: ignore[import-not-found]
from probe import environments, last_line, run  # type: ignore[import-not-found]
from stand_ins import write_stand_ins  # type: ignore[import-not-found]

# Compiling all of transformers takes longer than compiling what is imported at its first use.
_PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile", "--prefer-binary")
# Settings of a user's pip that would send packages elsewhere or refuse a venv
_PIP_DROPPED = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_CONSTRAINT",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_BREAK_SYSTEM_PACKAGES",
)
_PIP_INDEX = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
_NETWORK = (
    "ConnectionError", "ConnectTimeout", "ReadTimeout", "timed out", "Connection broken", "Could not fetch URL",
    "Temporary failure in name resolution", "Network is unreachable", "HTTPError", "IncompleteRead",
)  # fmt: skip


class Failed(Exception):
    """One line for the user. `kind` is "packages" when pip did not find or get what it needs."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def say(line: str) -> None:
    """A line of the log that the laptop shows."""
    print("== " + line, flush=True)


def site_folder(folder: str) -> str:
    found = glob.glob(os.path.join(folder, "lib", "python3*", "site-packages"))
    if not found:
        raise Failed(f"{folder} has no site-packages")
    return found[0]


def add_packages(spec: dict[str, Any], folder: str, handle: int, scratch: str) -> dict[str, Any]:
    """Installs into this venv what is missing, from the first index that works; what complete.json says."""
    for name in ("requirements", "constraints"):
        with open(os.path.join(scratch, name), "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in spec[name])
    if spec["requirements"]:
        install_from_any(spec, folder, handle, scratch)
    added = sorted(distributions(folder))
    say("nothing was missing" if not added else f"packages installed: {', '.join(added)}")
    done = {"installed": added}
    write_json(os.path.join(folder, "complete.json"), done)
    return done


def install_from_any(spec: dict[str, Any], folder: str, handle: int, scratch: str) -> None:
    indexes = spec["indexes"] or [None]
    for number, index in enumerate(indexes):
        try:
            install_from(spec, index, folder, handle, scratch)
            return
        except Failed as error:
            if error.kind != "network" or number + 1 == len(indexes):
                raise
            say(f"{error}; trying the next package index")


def distributions(folder: str) -> set[str]:
    names = glob.glob(os.path.join(site_folder(folder), "*.dist-info"))
    return {os.path.basename(name)[: -len(".dist-info")].replace("-", " ") for name in names}


def find_pip(spec: dict[str, Any], python: str) -> list[str]:
    """A command line of pip for this venv, from the first place that has one."""
    if run([python, "-c", "import pip"], 30.0)[0] == 0:  # the image's
        return [python, "-m", "pip"]
    for wheel in sorted(glob.glob("/usr/share/python-wheels/pip-*.whl"), reverse=True):
        if run([python, os.path.join(wheel, "pip"), "--version"], 30.0)[0] == 0:
            return [python, os.path.join(wheel, "pip")]
    for other in spec.get("pips", ()):
        if run([other, "-m", "pip", "--python", python, "--version"], 30.0)[0] == 0:
            return [other, "-m", "pip", "--python", python]
    if run([python, "-m", "ensurepip"], 60.0)[0] == 0:
        return [python, "-m", "pip"]
    raise Failed("there is no pip for the image's Python, and no ensurepip: apt-get install python3-pip", "pip")


def pip_environment(home: str, index: str | None, scratch: str) -> dict[str, str]:
    """With the box's own pip configuration only where its index was chosen; caches on the disk of HOME."""
    envs = environments()
    use_proxies(envs)
    dropped = (*_PIP_DROPPED, "PYTHONHOME", *(() if index == "own" else _PIP_INDEX))
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(
        PIP_USER="0",
        PIP_CACHE_DIR=ours(home, "install", "cache", "pip"),
        TMPDIR=scratch,
        PIP_NO_WARN_SCRIPT_LOCATION="1",
    )
    env["UV_CACHE_DIR"] = ours(home, "install", "cache", "uv")
    if index == "own":
        env["UV_INDEX_URL"] = (
            own_index(envs) or ""
        )  # uv does not read pip's files; not as an argument: it may be secret
    if index != "own":
        env["PIP_CONFIG_FILE"] = os.devnull
    return env


def install_from(spec: dict[str, Any], index: str | None, folder: str, handle: int, scratch: str) -> None:
    """With uv where it is there and succeeds, else with pip, which also has the better words for what fails."""
    env = pip_environment(spec["home"], index, scratch)
    sources = ["--index-url", index] if index is not None and index != "own" else []
    sources += ["--no-index"] if index is None else []
    for links in spec["find_links"]:
        sources += ["--find-links", links]
    say(
        "looking for what is missing"
        + (f" at {index.split('//')[-1].split('/')[0]}" if index not in (None, "own") else "")
    )
    python = os.path.join(folder, "bin", "python")
    if spec["uv"] and install_by_uv(spec, python, sources, env, handle, scratch):
        return
    argv = [*find_pip(spec, python), "install", *_PIP_OPTIONS, *sources]
    argv += ["-r", os.path.join(scratch, "requirements"), "-c", os.path.join(scratch, "constraints")]
    code, text = logged(argv, env, handle)
    if code:
        raise pip_failed(text, code)


def install_by_uv(
    spec: dict[str, Any], python: str, sources: list[str], env: dict[str, str], handle: int, scratch: str
) -> bool:
    """uv does not see an image's packages from a venv, and would install another torch: it resolves against stand-ins
    for them, and installs the rest without looking at dependencies again."""
    chosen, pins = os.path.join(scratch, "chosen"), os.path.join(scratch, "installed-versions")
    stand_ins = os.path.join(scratch, "installed")
    with open(pins, "w", encoding="utf-8") as file:
        file.writelines(pin + "\n" for pin in write_stand_ins(stand_ins, spec["packages"]))
    uv = [spec["uv"], "pip"]
    resolve = [*uv, "compile", "--no-config", "--quiet", "--no-header", "--no-annotate", "--python", python, *sources]
    resolve += ["--find-links", stand_ins, "--output-file", chosen, os.path.join(scratch, "requirements")]
    for kept in (pins, os.path.join(scratch, "constraints")):  # everything as it is if possible, else torch at least
        code, _ = logged([*resolve, "--constraint", kept], env, handle)
        if code == 0:
            break
    else:
        return False
    with open(chosen, encoding="utf-8") as file:
        lines = [line.strip() for line in file if "==" in line]
    there = {f"{name}=={version}" for name, version in spec["packages"].items()}
    missing = [line for line in lines if line.split(" ")[0] not in there]
    with open(chosen, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in missing)
    say(f"installing {len(missing)} packages with uv")
    install = [*uv, "install", "--no-config", "--no-deps", "--python", python, *sources, "-r", chosen]
    return not missing or logged(install, env, handle)[0] == 0


def logged(argv: list[str], env: dict[str, str], handle: int) -> tuple[int, str]:
    """Runs it with its output in the log. The lock is inherited: while pip lives, no second installation starts."""
    print("$ " + " ".join(argv), flush=True)
    os.set_inheritable(handle, True)
    child = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(handle,)
    )
    kept: list[str] = []
    for line in child.stdout or ():
        text = line.decode("utf-8", "replace")
        print(text, end="", flush=True)
        kept = [*kept[-200:], text]
    return child.wait(), "".join(kept)


def pip_failed(text: str, code: int) -> Failed:
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return Failed("No space left on device", "disk")
    errors = [line for line in text.splitlines() if line.startswith(("ERROR:", "error:"))]
    reasons = [line.strip() for line in text.splitlines() if re.search(r"requires|depends on|requested", line)]
    message = last_line(errors[-1] if errors else text, f"exit code {code}")
    if "ResolutionImpossible" in message or "conflicting dependencies" in text:
        message = "no versions fit together beside the image's torch: " + "; ".join(reasons[-4:])[:300]
    kind = "network" if any(word in text for word in _NETWORK) else "packages"
    return Failed(f"pip: {message}", kind)
