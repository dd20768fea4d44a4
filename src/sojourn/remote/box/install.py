"""Builds our environment beside the image's Python; standard library only, Python 3.8 to 3.13.

  check JSON    the environment that is there, if it is complete and fits: reads two small files
  network JSON  seconds that each package index and each hub needs for one small page
  start SPEC    installs as SPEC (a JSON file) says, detached from the connection; at most one at a time
  wait HOME ID OFFSET SECONDS   what the log has from that byte on, and the result, as soon as there is any

Two layers, so that new code of ours needs no pip: HOME/.sojourn/envs/packages-KEY has what was missing in the image,
HOME/.sojourn/envs/sojourn-KEY has our wheel and a .pth file that names the other layers. HOME/.sojourn/env links to the
latter. A layer without its complete.json is the rest of a killed installation, and is removed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
import traceback
from typing import Any

MARKER = "SOJOURN-INSTALL "
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "requests_ca_bundle")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_RUNNING = "running.json"


def read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: str, value: dict[str, Any]) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def ours(home: str, *parts: str) -> str:
    return os.path.join(home, ".sojourn", *parts)


def check(asked: dict[str, Any]) -> dict[str, Any]:
    """What complete.json of the environment says if our code and the image's torch are as they were; else why not."""
    folder = os.path.realpath(ours(asked["home"], "env"))
    stamp = read_json(os.path.join(folder, "complete.json"))
    if not stamp:
        return {"why": "there is none yet"}
    if stamp.get("digest") != asked["digest"]:
        complete = os.path.exists(os.path.join(stamp.get("packages", ""), "complete.json"))
        return {"why": "another version of Sojourn is installed", "old": stamp if complete else {}}
    if not os.access(stamp["base"], os.X_OK) or not os.path.exists(os.path.join(folder, "bin", "python")):
        return {"why": "the image's Python is no longer there"}
    info = (stamp.get("torch") or {}).get("info")
    if info and not os.path.isdir(info):
        return {"why": "the image's torch has changed"}
    if not os.path.exists(os.path.join(stamp["packages"], "complete.json")):
        return {"why": "its packages are incomplete"}
    return {"stamp": stamp}


def network(asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds per URL, None where it does not answer. The box's own index may carry a password: it is named "own"."""
    from probe import environments, parallel  # type: ignore[import-not-found]

    envs = environments()
    use_proxies(envs)
    pages = {url: url.rstrip("/") + "/peft/" for url in asked["indexes"]}
    own = own_index(envs)
    if own:
        pages["own"] = own.rstrip("/") + "/peft/"
    hubs = {url: url.rstrip("/") + "/gpt2/resolve/main/config.json" for url in asked["hubs"]}
    seconds: dict[str, float | None] = dict.fromkeys([*pages, *hubs])

    def work(item: tuple[str, str, bytes]) -> None:
        name, page, expected = item
        seconds[name] = time_page(page, expected, asked["seconds"])

    jobs = [(name, page, b"peft") for name, page in pages.items()] + [(n, p, b"gpt2") for n, p in hubs.items()]
    parallel(work, jobs, asked["seconds"] + 1)
    hub = next((env["HF_ENDPOINT"] for env in envs if env.get("HF_ENDPOINT")), None)
    return {
        "indexes": {name: seconds[name] for name in pages},
        "hubs": {name: seconds[name] for name in hubs},
        "own_host": own.split("//")[-1].split("@")[-1].split("/")[0] if own else None,
        "hf_endpoint": hub,
    }


def time_page(url: str, expected: bytes, most: float) -> float | None:
    import base64
    import urllib.parse
    import urllib.request

    started = time.monotonic()
    headers = {"User-Agent": "pip/24 sojourn", "Accept": "text/html,*/*"}
    try:
        parts = urllib.parse.urlsplit(url)
        user, at, place = parts.netloc.rpartition("@")
        if at:  # urllib takes no password in a URL
            secret = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            headers["Authorization"], url = "Basic " + secret, parts._replace(netloc=place).geturl()
        asked = urllib.request.Request(url, headers=headers)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=most) as answer:  # noqa: S310
            text = answer.read(1 << 20)
    except (OSError, ValueError):
        return None
    return round(time.monotonic() - started, 3) if expected in text.lower() else None


def own_index(envs: tuple[dict[str, str], ...]) -> str | None:
    """The index of the box's own pip configuration."""
    import configparser

    for env in envs:
        if env.get("PIP_INDEX_URL"):
            return env["PIP_INDEX_URL"]
    user = os.path.expanduser("~")
    found = None
    for file in ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", user + "/.pip/pip.conf", user + "/.config/pip/pip.conf"):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("global", "install"):
            found = parser.get(section, "index-url", fallback=None) or found
    return found


def use_proxies(envs: tuple[dict[str, str], ...]) -> None:
    """A proxy of the login shell or of the image also holds for a command over SSH."""
    for env in envs:
        for name, value in env.items():
            if name.lower() in _PROXIES or name == "PIP_INDEX_URL":
                os.environ.setdefault(name, value)


def lock(home: str) -> int | None:
    """A descriptor that holds the lock, or None: an installation is running. pip inherits it, so that it counts too."""
    import fcntl  # the laptop imports this file too, and Windows has no fcntl

    folder = ours(home, "install")
    os.makedirs(folder, exist_ok=True)
    for path in (os.path.join(folder, "lock"), f"/tmp/sojourn-install-{os.getuid()}.lock"):  # noqa: S108
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:  # some network disks have no locks
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise
    return None


def start(spec_file: str) -> dict[str, Any]:
    spec = read_json(spec_file)
    home, folder = spec["home"], ours(spec["home"], "install")
    handle = lock(home)
    if handle is None:
        return {"state": "busy", "id": read_json(os.path.join(folder, _RUNNING)).get("id")}
    result, log = os.path.join(folder, spec["id"] + ".json"), os.path.join(folder, spec["id"] + ".log")
    if os.path.exists(result):
        os.unlink(result)
    write_json(os.path.join(folder, _RUNNING), {"id": spec["id"]})
    with open(log, "wb"):
        pass
    if os.fork():
        return {"state": "started", "id": spec["id"], "log": log}
    os.setsid()
    if os.fork():
        os._exit(0)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    try:
        outcome = install(spec, handle)
    except BaseException as error:
        traceback.print_exc()
        outcome = {"ok": False, "error": f"{type(error).__name__}: {error}", "kind": "bug"}
    write_json(result, outcome)
    os._exit(0)


def wait(home: str, name: str, offset: int, seconds: float) -> dict[str, Any]:
    folder = ours(home, "install")
    until = time.monotonic() + seconds
    while True:
        result = read_json(os.path.join(folder, name + ".json"))
        try:
            with open(os.path.join(folder, name + ".log"), "rb") as file:
                file.seek(offset)
                text = file.read(1 << 18)
        except OSError:
            text = b""
        if not result and (handle := lock(home)) is not None:
            os.close(handle)
            result = read_json(os.path.join(folder, name + ".json")) or {"died": True}
        if result or text or time.monotonic() >= until:
            return {"log": text.decode("utf-8", "replace"), "offset": offset + len(text), "result": result or None}
        time.sleep(0.1)


def install(spec: dict[str, Any], handle: int) -> dict[str, Any]:
    """The result for the laptop: the environment's complete.json, or one line about what went wrong."""
    from layers import Failed, build  # type: ignore[import-not-found]

    started, keep_cache = time.monotonic(), False
    scratch = ours(spec["home"], "install", "tmp-" + spec["id"])
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        os.makedirs(scratch, mode=0o700)
        stamp = build(spec, handle, scratch)
        return {"ok": True, "stamp": stamp, "seconds": round(time.monotonic() - started, 1)}
    except Failed as error:
        keep_cache = error.kind == "network"  # what was downloaded is not downloaded again
        return {"ok": False, "error": str(error), "kind": error.kind}
    except OSError as error:
        return {"ok": False, "error": describe(error), "kind": "disk"}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not keep_cache:
            shutil.rmtree(ours(spec["home"], "install", "cache"), ignore_errors=True)


def describe(error: OSError) -> str:
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def main(argv: list[str]) -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        if argv[0] == "check":
            answer = check(json.loads(argv[1]))
        elif argv[0] == "network":
            answer = network(json.loads(argv[1]))
        elif argv[0] == "start":
            answer = start(argv[1])
        else:
            answer = wait(argv[1], argv[2], int(argv[3]), float(argv[4]))
    except OSError as error:
        answer = {"error": describe(error)}
    print("\n" + MARKER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
