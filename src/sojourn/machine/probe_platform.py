"""Probes of the platform: its limits, persistent folders, mirrors, the Hugging Face token, the SSH session."""

import configparser
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from sojourn.expand_user import expand_user
from sojourn.machine.finding import Finding
from sojourn.machine.platform import Platform, find_home, is_persistent

CLEARED = ("/tmp", "/dev/shm", "/run")  # noqa: S108


def platform_limits(platform: Platform) -> Finding:
    facts = platform.facts
    data = {
        "platform": facts.name,
        "grade": facts.grade,
        "session_hours": facts.session_hours,
        "idle_minutes": facts.idle_minutes,
        "weekly_gpu_hours": facts.weekly_gpu_hours,
        "stop": facts.stop,
    }
    if not platform.is_known:
        return Finding("platform", "ok", f"{facts.title}: no limits known", data=data)
    message = f"{facts.title} (by {platform.detected_by}): {facts.limits}; wiped: {facts.wiped}"
    return Finding("platform", "ok", message, data=data)


def persistence(platform: Platform, home: Path, root: Path) -> Finding:
    """Whether the folder where runs live survives a stop of this platform."""
    lasting = is_persistent(platform, home, root)
    best = find_home(platform, root)
    data = {"home": str(home), "survives": lasting, "best": None if best.path is None else str(best.path)}
    if lasting is None and any(home.absolute().is_relative_to(place) for place in CLEARED):
        message = f"{home.absolute()} is cleared when the machine restarts"
        return Finding("runs kept in", "warn", message, "export SOJOURN_HOME=$HOME/sojourn", data)
    if lasting is None:
        return Finding("runs kept in", "ok", f"{home.absolute()} (your own disk, as far as is known)", data=data)
    if lasting:
        return Finding("runs kept in", "ok", f"{home} survives a stop of {platform.facts.title}", data=data)
    if best.path is not None and best.warning is None:
        message = f"{home} is wiped by {platform.facts.title}; {best.path} survives"
        return Finding("runs kept in", "fail", message, f"export SOJOURN_HOME={best.path}", data)
    return Finding("runs kept in", "warn", f"{home}: {best.warning}", best.fix, data)


def mirrors(platform: Platform, env: Mapping[str, str], root: Path) -> Finding:
    """Where models and packages come from; nothing is contacted."""
    endpoint, pip = env.get("HF_ENDPOINT"), pip_mirror(env, root)
    turbo = platform.facts.turbo
    has_turbo = turbo is not None and (root / turbo.lstrip("/")).is_file()
    data = {"hf_endpoint": _host(endpoint), "pip_index": _host(pip), "network_turbo": has_turbo}
    seen = [f"models from {_host(endpoint) or 'huggingface.co'}", f"packages from {_host(pip) or 'the default index'}"]
    if has_turbo:
        is_on = env.get("http_proxy") or env.get("https_proxy")
        seen.append("network_turbo is there and on" if is_on else "network_turbo is there")
    message = ", ".join(seen)
    if platform.facts.region == "cn" and not endpoint:
        fix = "export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1"
        fix += f", or for one download: source {turbo}" if has_turbo else ""
        return Finding("mirrors", "warn", f"{message}; huggingface.co is slow or closed from here", fix, data)
    if endpoint and "huggingface.co" not in endpoint and env.get("HF_HUB_DISABLE_XET") != "1":
        message += "; a mirror does not serve the xet protocol"
        return Finding("mirrors", "warn", message, "export HF_HUB_DISABLE_XET=1", data)
    return Finding("mirrors", "ok", message, data=data)


def pip_mirror(env: Mapping[str, str], root: Path) -> str | None:
    """The package index pip is set to, from its variable or its files."""
    if url := env.get("PIP_INDEX_URL"):
        return url
    user = Path(env.get("HOME") or Path.home())
    files = [user / ".config/pip/pip.conf", user / ".pip/pip.conf", root / "etc/pip.conf"]
    if chosen := env.get("PIP_CONFIG_FILE"):
        files.insert(0, Path(chosen))
    for file in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        if found := parser.get("global", "index-url", fallback=None):
            return found
    return None


def token(env: Mapping[str, str]) -> Finding:
    """Whether a Hugging Face token is there; never which."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if env.get(name, "").strip():
            return Finding("hf token", "ok", f"set in {name} (not shown)", data={"present": True})
    home = expand_user(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    file = expand_user(env.get("HF_TOKEN_PATH") or home / "token")
    if file.is_file() and file.stat().st_size:
        return Finding("hf token", "ok", f"stored in {file} (not shown)", data={"present": True})
    message = "none; only gated models (Llama, Gemma) need one: hf auth login"
    return Finding("hf token", "ok", message, data={"present": False})


def session(env: Mapping[str, str]) -> Finding:
    """Whether a dropped SSH connection would take a run with it."""
    over_ssh = bool(env.get("SSH_CONNECTION") or env.get("SSH_TTY"))
    kept = next((tool for tool, name in (("tmux", "TMUX"), ("screen", "STY")) if env.get(name)), None)
    data = {"ssh": over_ssh, "kept_by": kept}
    if not over_ssh:
        return Finding("session", "ok", "not over SSH" + (f", inside {kept}" if kept else ""), data=data)
    if kept:
        return Finding("session", "ok", f"over SSH, inside {kept}: a dropped connection does no harm", data=data)
    tool = next((t for t in ("tmux", "screen") if shutil.which(t, path=env.get("PATH", os.defpath))), None)
    detached = "nohup sojourn train RUN > train.log 2>&1 &"
    fix = {"tmux": "tmux new -s sojourn", "screen": "screen -S sojourn", None: detached}[tool]
    return Finding("session", "warn", "over SSH without tmux or screen: a dropped connection ends the run", fix, data)


def _host(url: str | None) -> str | None:
    """A URL's host alone: index URLs may carry a password."""
    if not url:
        return None
    return urlsplit(url if "//" in url else f"//{url}").hostname or "an unreadable address"
