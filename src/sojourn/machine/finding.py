"""The result of a probe, and a runner that turns a probe's crash or hang into such a result."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what was checked, the verdict, what was seen, and what to type to fix it."""

    name: str
    level: Level
    message: str
    fix: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[], Finding | list[Finding]]


def guarded(name: str, probe: Probe, seconds: float = 20, crash: Level = "fail") -> list[Finding]:
    """Runs a probe in a thread: an exception or a timeout becomes one finding."""
    found: list[Finding] = []

    def work() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = probe()
            found.extend(answer if isinstance(answer, list) else [answer])
        except Exception as error:  # a broken driver or disk is a finding, not a crash of the doctor
            found.append(Finding(name, crash, one_line(error)))

    # A daemon thread: a dead network disk or driver must not keep the doctor from exiting.
    thread = threading.Thread(target=work, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [Finding(name, "fail", f"timed out after {seconds:g} s", data={"timed_out": True})]
    return found


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def gib(size: float) -> str:
    value = size / 1024**3
    return f"{value:.0f} GiB" if value >= 10 else f"{value:.1f} GiB"
