"""The layers of our environment on a box: what pip adds to the image's Python, and our own code (see install.py).

The image is never changed: pip writes into a venv of ours that sees the image's packages, with torch and what belongs
to it pinned to the versions that are there. Afterwards torch must be the same version in the same file.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import time
import zipfile
from typing import TYPE_CHECKING, Any

from install import ours, read_json, write_json  # type: ignore[import-not-found]
from packages import Failed, add_packages, say, site_folder  # type: ignore[import-not-found]
from probe import import_torch, last_line, run  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import Iterable


def build(spec: dict[str, Any], handle: int, scratch: str) -> dict[str, Any]:
    """Both layers, where they are not complete yet; torch checked; the link `env` moved; unused layers removed."""
    base = spec["python"]
    if spec["make_python"]:
        base = make_python(spec["make_python"], ours(spec["home"], "python"))
    packages = ours(spec["home"], "envs", "packages-" + spec["key"])
    code = ours(spec["home"], "envs", "sojourn-" + spec["id"])
    new = [code] if read_json(os.path.join(packages, "complete.json")) else [packages, code]
    try:
        stamp = fill(spec, base, packages, code, handle, scratch)
    except BaseException:  # also gives back the disk when that is full
        remove(new)
        raise
    point_to(ours(spec["home"], "env"), code)
    remove_unused(spec["home"], code)
    return stamp


def fill(spec: dict[str, Any], base: str, packages: str, code: str, handle: int, scratch: str) -> dict[str, Any]:
    done = read_json(os.path.join(packages, "complete.json"))
    if not done:
        say("making an environment that sees the packages of " + base)
        write_parents(new_environment(base, packages, spec["system"]), spec["parents"])
        done = add_packages(spec, packages, handle, scratch)
    folder = new_environment(base, code, spec["system"])
    write_parents(folder, [site_folder(packages), *spec["parents"]])
    add_wheel(spec["wheel"], folder, code)
    python = os.path.join(code, "bin", "python")
    torch, warning = check_torch(spec, base, python)
    stamp = {
        "key": spec["key"], "digest": spec["digest"], "base": base, "packages": packages, "python": python,
        "env": spec["env"], "torch": torch, "installed": done["installed"], "warning": warning, "time": time.time(),
    }  # fmt: skip
    write_json(os.path.join(code, "complete.json"), stamp)
    return stamp


def make_python(tool: dict[str, str], folder: str) -> str:
    """A Python of our own, for images that have only older ones."""
    python = os.path.join(folder, "bin", "python")
    if run([python, "-c", "import encodings"])[0] == 0:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    say(f"making Python {tool['version']} in {folder}")
    if tool["name"] == "uv":
        argv = [tool["path"], "venv", "--quiet", "--python", tool["version"], folder]
    else:
        argv = [tool["path"], "create", "--yes", "--quiet", "--prefix", folder, f"python={tool['version']}", "pip"]
    code, out, err = run(argv, 1800.0)
    print(out + err, flush=True)
    if code:
        shutil.rmtree(folder, ignore_errors=True)
        err = "\n".join(line for line in err.splitlines() if not line.strip().startswith("hint:"))
        raise Failed(f"{tool['name']} could not make Python {tool['version']}: {last_line(err or out, str(code))}")
    return python


def new_environment(base: str, folder: str, system: bool) -> str:
    """An empty venv; with `system` it sees the packages of the Python that `base` comes from. Its site-packages."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    argv = [base, "-m", "venv", "--without-pip", *(["--system-site-packages"] if system else []), folder]
    code, out, err = run(argv, 120.0)
    if code:
        raise Failed(f"{base} -m venv failed: {last_line(err or out, str(code))}")
    return str(site_folder(folder))


def write_parents(site: str, parents: Iterable[str]) -> None:
    """A venv made by a venv's Python does not see that venv's packages: a .pth file names them."""
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
    with open(os.path.join(site, "sojourn-parents.pth"), "w", encoding="utf-8") as file:
        file.writelines(lines)


def add_wheel(wheel: str, site: str, folder: str) -> None:
    """Our wheel is ours: pure Python, one script. Unpacking it takes no pip."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = os.path.join(folder, "bin", "sojourn")
    python = os.path.join(folder, "bin", "python")
    # a shebang has at most 127 bytes on older kernels, and no spaces
    text = f"""#!/bin/sh
'''exec' {shlex.quote(python)} "$0" "$@"
' '''
import sys
from sojourn.cli.main import main
sys.exit(main())
"""
    with open(script, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(script, 0o755)  # noqa: S103


def check_torch(spec: dict[str, Any], base: str, python: str) -> tuple[dict[str, Any], str | None]:
    """The torch that our environment imports. It must be the image's, and use the GPU if it does so in the image."""
    say("checking torch")
    expected = spec.get("torch") or {}
    torch = import_torch(python)
    if expected and "error" not in torch:
        same = os.path.realpath(torch["file"]) == os.path.realpath(expected["file"])
        if not same or torch["version"].split("+")[0] != expected["version"].split("+")[0]:
            raise Failed(
                f"torch {expected['version']} of the image would be hidden by {torch['version']}: undone", "torch"
            )
    blind = bool(expected.get("cuda") and spec.get("gpus") and not torch.get("cuda_available"))
    if "error" not in torch and not blind:
        return {**expected, **torch}, None
    why = torch.get("error") or "torch finds no GPU, although nvidia-smi lists one"
    before = import_torch(base) if expected else {"error": ""}
    if "error" not in before and ("error" in torch or before["cuda_available"]):
        raise Failed(f"torch works in the image, but not beside our packages: {why}: undone", "torch")
    if not expected:
        raise Failed(f"the torch that was installed does not work: {why}", "torch")
    return {**expected, **torch}, f"{why}: it is so in the image itself; try another image"


def remove(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def point_to(link: str, folder: str) -> None:
    """The link changes in one step; what runs from the folder that it named goes on there."""
    new = link + ".new"
    if os.path.islink(new) or os.path.exists(new):
        os.unlink(new)
    os.symlink(folder, new)
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    os.replace(new, link)


def remove_unused(home: str, current: str) -> None:
    """Layers that neither the link, nor a job, nor a process names."""
    texts = [" ".join([current, json.dumps(read_json(os.path.join(current, "complete.json")))])]
    for pattern in (ours(home, "jobs", "*", "spec.json"), "/proc/[0-9]*/cmdline"):
        for path in glob.glob(pattern):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    texts.append(file.read())
            except OSError:
                continue
    layers = glob.glob(ours(home, "envs", "sojourn-*"))
    linked = os.path.join(ours(home, "env"), "")  # a process that was started by the link may use any of them
    used = {folder for folder in layers if any(folder in text or linked in text for text in texts)}
    texts += [json.dumps(read_json(os.path.join(folder, "complete.json"))) for folder in used]
    for folder in glob.glob(ours(home, "envs", "*")):
        if folder not in used and not any(folder in text for text in texts):
            shutil.rmtree(folder, ignore_errors=True)
