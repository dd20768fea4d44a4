"""Gets our trainer running on a box beside the image's own CUDA torch, which is never touched.

Nothing changed since the last time: one short command there. Otherwise: look at the image, choose its Python and the
fastest package index, and let box/install.py build our environment, detached: a lost connection does not stop it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sojourn.catalog.platforms import PlatformFacts
from sojourn.errors import RunFailed
from sojourn.remote import box_network
from sojourn.remote.box.install import MARKER
from sojourn.remote.box_client import Box
from sojourn.remote.box_facts import box_script, probe
from sojourn.remote.connection import Runner
from sojourn.remote.hosts import Host
from sojourn.remote.image_python import ImagePython, choose_python, is_complete
from sojourn.remote.offline_wheels import download_wheels
from sojourn.remote.wheel import build_wheel, requirements, wheel_digest, wheel_metadata

Say = Callable[[str], None]
_TOOLS = ("probe.py", "install.py", "layers.py", "packages.py", "stand_ins.py")
_POLL = 10.0
_BUSY_PAUSE, _BUSY_MINUTES = 2.0, 60
_INSTALL_MINUTES = 3  # about 200 MB of packages


@dataclass(frozen=True)
class BoxPython:
    """`python` runs Sojourn on the box; `base` is the image's. `env`: variables that a job needs there. `installed`:
    what was added beside the image; `fresh`: whether something was done just now."""

    python: str
    base: str
    torch: str
    cuda_available: bool
    env: dict[str, str] = field(default_factory=dict)
    installed: tuple[str, ...] = ()
    fresh: bool = True
    warnings: tuple[str, ...] = ()


def bootstrap(box: Box, host: Host, say: Say, *, install_torch: bool = False) -> BoxPython:
    """The environment HOME/.sojourn/env on the box, made or found. One line as UserError when it cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        digest = wheel_digest(wheel)
        asked = json.dumps({"home": host.home, "digest": digest})
        found = _ask(box, ["-", "check", asked], [f"{host.home}/.sojourn/env/bin/python"], box_script("install.py"))
        if "stamp" in found:
            return _box_python(found["stamp"], fresh=False)
        say(f"{host.name}: setting up Sojourn ({found.get('why', 'there is none yet')})")
        return _set_up(box, host, say, wheel, digest, found.get("old", {}), install_torch)


def _set_up(
    box: Box, host: Host, say: Say, wheel: Path, digest: str, old: Mapping[str, Any], install_torch: bool
) -> BoxPython:
    facts = probe(box, host.home, packages=True)
    image = choose_python(facts, host, install_torch)
    say(f"{host.name}: {image.describe()}")
    needs = [
        need for need in requirements(wheel_metadata(wheel), "train") if image.torch is None or not _is_torch(need)
    ]
    needs = [] if image.torch is not None and is_complete(needs, image.row) else needs
    key = _key(image, needs)
    runner, ours = facts.found["python"], f"{host.home}/.sojourn"
    for name in _TOOLS:
        _write(box, host, f"{ours}/box/{name}", box_script(name))
    with _as_install_failed(host):
        box.push([(wheel, f"{ours}/wheels/{wheel.name}")], durable=True)  # resumed where connections do not last
    spec: dict[str, Any] = {
        "id": f"{key}-{digest[:12]}", "key": key, "home": host.home, "digest": digest,
        "python": image.python, "make_python": image.make_python, "parents": image.parents, "system": image.system,
        "torch": image.torch, "gpus": len(facts.gpus), "wheel": f"{ours}/wheels/{wheel.name}",
        "requirements": needs, "constraints": image.constraints, "packages": image.row["packages"],
        "uv": facts.found["uv"], "pips": [row["path"] for row in facts.pythons if row["pip"]],
        "indexes": [], "find_links": [], "env": old.get("env", {}),
    }  # fmt: skip
    installer = Installer(box, host, say, runner)
    warnings = []
    if old.get("key") != key:  # else only our own code is new, which needs no network
        advice = no_gpu_advice(facts.platform.facts, host, len(facts.gpus), _INSTALL_MINUTES)
        if advice is not None and needs:
            say(f"{host.name}: {advice}")
        network = box_network.choose(installer.ask("network", json.dumps(box_network.to_measure(facts.platform.facts))))
        say(f"{host.name}: {network.message}")
        warnings += [network.warning] if network.warning else []
        spec.update(indexes=network.indexes, env=network.env)
    stamp = installer.install(spec) if spec["indexes"] else _install_offline(installer, spec, image)
    done = _box_python(stamp, fresh=True)
    return replace(done, warnings=(*warnings, *done.warnings))


def _install_offline(installer: Installer, spec: dict[str, Any], image: ImagePython) -> dict[str, Any]:
    """With what the image has, else with wheels from here."""
    try:
        return installer.install(spec)
    except InstallFailed as error:
        if error.kind != "packages" or image.python is None:
            raise
    from platformdirs import user_cache_dir

    host = installer.host
    installer.say(f"{host.name}: no package index answers there; downloading what is missing here")
    folder = Path(user_cache_dir("sojourn", appauthor=False)) / "wheels" / spec["key"]
    wheels = download_wheels(spec["requirements"], spec["constraints"], image.row, folder)
    size = sum(wheel.stat().st_size for wheel in wheels)
    installer.say(f"{host.name}: {len(wheels)} packages, {size / 1e6:.0f} MB, travel there")
    target = f"{host.home}/.sojourn/wheels/{spec['key']}"
    installer.box.push([(wheel, f"{target}/{wheel.name}") for wheel in wheels])
    return installer.install({**spec, "find_links": [target]})


class InstallFailed(RunFailed):
    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Installer:
    """Starts box/install.py and follows it; one that another laptop or an earlier connection started is joined."""

    box: Box
    host: Host
    say: Say
    python: str

    def ask(self, *arguments: str) -> dict[str, Any]:
        answer = _ask(self.box, [f"{self.host.home}/.sojourn/box/install.py", *arguments], [self.python])
        if "error" in answer:
            raise InstallFailed(f"{self.host.name}: {answer['error']}", "disk")
        return answer

    def install(self, spec: dict[str, Any]) -> dict[str, Any]:
        """complete.json of the new environment."""
        name, home = spec["id"], self.host.home
        file = f"{home}/.sojourn/install/{name}.spec"
        _write(self.box, self.host, file, json.dumps(spec).encode())
        for _ in range(2):
            self._start(file, name)
            result = self._follow(name)
            if not result.get("died"):
                break
        log = f"{home}/.sojourn/install/{name}.log"
        if result.get("died"):
            raise InstallFailed(f"{self.host.name}: the installation was killed twice (log there: {log})", "died")
        if not result["ok"]:
            more = f"; {home} is full: free some space there" if "No space left" in result["error"] else ""
            raise InstallFailed(f"{self.host.name}: {result['error']}{more} (log there: {log})", result["kind"])
        stamp: dict[str, Any] = result["stamp"]
        return stamp

    def _start(self, file: str, name: str) -> None:
        until = time.monotonic() + _BUSY_MINUTES * 60
        waited = False
        while True:
            answer = self.ask("start", file)
            if answer["state"] == "started" or answer.get("id") == name:
                return
            if time.monotonic() > until:
                raise InstallFailed(f"{self.host.name}: another installation runs there since an hour", "busy")
            if not waited:
                self.say(f"{self.host.name}: another installation is running there; waiting for it")
                waited = True
            time.sleep(_BUSY_PAUSE)

    def _follow(self, name: str) -> dict[str, Any]:
        offset, rest = 0, ""
        while True:
            answer = self.ask("wait", self.host.home, name, str(offset), str(_POLL))
            offset = answer["offset"]
            *lines, rest = (rest + answer["log"]).split("\n")
            for line in lines:
                if line.startswith("== "):
                    self.say(f"{self.host.name}: {line[3:]}")
            if answer["result"] is not None and not answer["log"]:
                result: dict[str, Any] = answer["result"]
                return result


def no_gpu_advice(facts: PlatformFacts, host: Host, gpus: int, minutes: float) -> str | None:
    """One line where preparing without the GPU would be cheaper; None where there is no such mode or no price."""
    cheap, price = facts.no_gpu_per_hour, host.price_per_hour
    if not gpus or cheap is None or price is None or price <= cheap:
        return None
    now, then = price * minutes / 60, cheap * minutes / 60
    unit = host.currency or facts.currency or ""
    return (
        f"preparing takes about {minutes:.0f} min, {now:.2f} {unit} with the GPU; in {facts.title}'s no-GPU mode "
        f"(start it so in its console) {then:.2f} {unit}, and larger downloads save more"
    )


def _ask(box: Runner, arguments: Sequence[str], python: Sequence[str], script: bytes = b"") -> dict[str, Any]:
    """The JSON line of box/install.py; empty where that Python or file is not there."""
    done = box.run([*python, *arguments], input=script, timeout=180)
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(MARKER):
            answer: dict[str, Any] = json.loads(line[len(MARKER) :])
            return answer
    if script:
        return {}
    last = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
    raise RunFailed(f"the installer did not answer: {last[-1][:200]}")


def _write(box: Box, host: Host, path: str, data: bytes) -> None:
    with _as_install_failed(host):
        box.write_bytes(path, data)


@contextlib.contextmanager
def _as_install_failed(host: Host) -> Iterator[None]:
    try:
        yield
    except RunFailed as error:
        raise InstallFailed(f"{host.name}: {host.home} cannot be written: {error}", "disk") from error


def _box_python(stamp: Mapping[str, Any], fresh: bool) -> BoxPython:
    torch = stamp["torch"]
    return BoxPython(
        python=stamp["python"],
        base=stamp["base"],
        torch=str(torch.get("version", "")),
        cuda_available=bool(torch.get("cuda_available")),
        env=dict(stamp.get("env", {})),
        installed=tuple(stamp["installed"]),
        fresh=fresh,
        warnings=(stamp["warning"],) if stamp.get("warning") else (),
    )


def _is_torch(requirement: str) -> bool:
    return requirement.startswith("torch") and not requirement[5:6].isalnum()


def _key(image: ImagePython, needs: Sequence[str]) -> str:
    torch = dict(image.torch or {})
    what = [
        image.python,
        image.row["version"],
        torch.get("version"),
        torch.get("info"),
        needs,
        image.constraints,
        image.parents,
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
