"""`sojourn doctor`: one small real operation per claim about this machine, and the fix for what is wrong."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sojourn.machine import probe_disk, probe_hardware, probe_platform, probe_software
from sojourn.machine.finding import Finding, guarded
from sojourn.machine.gpus import DetectedGpu, driver_gpus, merge_gpus, torch_gpus
from sojourn.machine.platform import ROOT, Platform, detect

__all__ = ["Finding", "examine", "exit_code", "next_step", "report"]


def examine(
    home: Path, env: Mapping[str, str] = os.environ, root: Path = ROOT, platform: Platform | None = None
) -> list[Finding]:
    """Everything worth knowing before a run. Contacts no network."""
    findings = guarded("python", probe_software.python) + guarded("sojourn", probe_software.sojourn)
    here = platform
    if here is None:
        try:
            here = detect(env, root)
        except Exception as error:  # a broken catalog.toml of the user's
            findings.append(Finding("platform", "fail", str(error)))
    if here is not None:
        place = here
        findings += guarded("platform", lambda: probe_platform.platform_limits(place))
        findings += guarded("runs kept in", lambda: probe_platform.persistence(place, home, root))
    findings += _compute(root)
    findings += probe_disk.disks(home, env)
    findings += guarded("shared memory", probe_disk.shared_memory, crash="warn")
    findings += guarded("clock", lambda: probe_disk.clock(home), crash="warn")
    if here is not None:
        place = here
        findings += guarded("mirrors", lambda: probe_platform.mirrors(place, env, root), crash="warn")
    findings += guarded("hf token", lambda: probe_platform.token(env), crash="warn")
    findings += guarded("session", lambda: probe_platform.session(env), crash="warn")
    return findings


def _compute(root: Path) -> list[Finding]:
    """CPU, memory, GPUs, torch and what depends on it."""
    from sojourn.machine import probe_attention, probe_parallel, probe_torch

    findings = guarded("cpu", lambda: probe_hardware.processor(root), crash="warn")
    findings += guarded("ram", lambda: probe_hardware.memory(root), crash="warn")
    by_driver: list[DetectedGpu] = []
    by_torch: list[DetectedGpu] = []
    loaded: list[probe_torch.Torch] = []

    def ask_driver() -> list[Finding]:
        try:
            by_driver.extend(driver_gpus())
        except RuntimeError as error:
            fix = "if this machine has a GPU, restart it; if the GPU is switched off, ignore this"
            return [Finding("gpu driver", "warn", str(error), fix)]
        return []

    def load_torch() -> list[Finding]:
        loaded.append(probe_torch.load())
        by_torch.extend(torch_gpus() if loaded[0].module is not None else [])
        return []

    trouble = guarded("gpu driver", ask_driver, seconds=35)
    # Importing torch from a cold network disk takes long; a GPU that hangs shows here too.
    stuck = guarded("torch", load_torch, seconds=120)
    findings += trouble + guarded("gpu", lambda: probe_hardware.cards(merge_gpus(by_driver, by_torch)), crash="warn")
    findings += stuck
    torch = loaded[0] if loaded else probe_torch.Torch(None, "timed out")
    if not stuck:
        findings += guarded("torch", lambda: probe_torch.build(torch, by_driver), seconds=60)
    if torch.module is not None and not stuck:
        module: Any = torch.module
        proved = guarded("precision", lambda: probe_torch.precision(module), seconds=60)
        findings += proved
        if not exit_code(proved):  # on a broken device the rest would only repeat it
            findings += guarded("attention", lambda: probe_attention.attention(module), seconds=60)
            fourbit = guarded(
                "bitsandbytes", lambda: probe_torch.bitsandbytes(module, bool(by_torch)), 60, crash="warn"
            )
            findings += fourbit
            findings += probe_parallel.parallel(module, by_torch)
    findings += guarded("libraries", lambda: probe_software.libraries(torch.module is not None))
    findings += guarded("extras", probe_software.extras, crash="warn")
    return findings


def exit_code(findings: list[Finding]) -> int:
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def next_step(findings: list[Finding]) -> str:
    """What to type now."""
    named = {finding.name: finding for finding in findings}
    if "ranks" in named:  # under torchrun
        bad = exit_code(findings)
        return (
            "fix what failed, then run the same command"
            if bad
            else "the same torchrun command with: -m sojourn train RUN"
        )
    if exit_code(findings):
        return "fix what failed, then: sojourn doctor"
    if "torch" in named and named["torch"].level != "ok" and named["torch"].fix:
        return f"to plan: sojourn plan small; to train: {named['torch'].fix}"
    return "sojourn demo"


def report(findings: list[Finding], home: Path, platform: Platform | None) -> dict[str, Any]:
    """The whole examination as one JSON object."""
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    place = None
    if platform is not None:
        facts = platform.facts
        place = {
            "name": facts.name,
            "title": facts.title,
            "detected_by": platform.detected_by,
            "grade": facts.grade,
        }
    listed = [{"name": f.name, "level": f.level, "message": f.message, "fix": f.fix, "data": f.data} for f in findings]
    summary = {**counts, "exit_code": exit_code(findings), "next": next_step(findings)}
    return {"platform": place, "home": str(home), "findings": listed, "summary": summary}
