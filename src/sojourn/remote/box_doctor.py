"""`sojourn doctor` on a box, summarised."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sojourn.errors import RunFailed
from sojourn.remote.bootstrap import BoxPython
from sojourn.remote.connection import Runner
from sojourn.remote.hosts import Host


@dataclass(frozen=True)
class BoxDoctor:
    """What `sojourn doctor` found on the box: how many of each level, and the lines that are not ok."""

    counts: dict[str, int]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.counts.get("fail")

    def describe(self) -> str:
        return ", ".join(f"{self.counts.get(level, 0)} {level}" for level in ("ok", "warn", "fail"))


def examine(box: Runner, host: Host, python: BoxPython, timeout: float = 300) -> BoxDoctor:
    """Under the conditions of a job: with its variables, and not bound to an SSH session."""
    env = {**python.env, "SOJOURN_HOME": host.home, "SSH_CONNECTION": "", "SSH_TTY": ""}
    argv = [python.python, "-m", "sojourn", "doctor", "--json", "--home", host.home]
    done = box.run(argv, timeout=timeout, env=env)
    text = done.stdout.decode("utf-8", "replace")
    try:
        findings = json.loads(text[text.index("{") :])["findings"]
    except (ValueError, KeyError, TypeError) as error:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
        raise RunFailed(f"{host.name}: sojourn doctor failed there: {last[-1][:200]}") from error
    counts: dict[str, int] = {}
    problems = []
    for finding in findings:
        counts[finding["level"]] = counts.get(finding["level"], 0) + 1
        if finding["level"] != "ok":
            fix = f" (fix: {finding['fix']})" if finding.get("fix") else ""
            problems.append(f"{finding['level']}: {finding['name']}: {finding['message']}{fix}")
    return BoxDoctor(counts, tuple(problems))
