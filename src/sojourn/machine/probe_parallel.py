"""Probes of a machine with several GPUs: are they of one kind, how are they linked, and how fast is an all-reduce."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.machine.finding import Finding, gib, guarded
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.hardware import volume

SHARED = Path("/dev/shm")  # noqa: S108
GIB = 1024**3
# GB/s of an all-reduce under which something other than the link is slow; healthy ones give ten times as much.
FLOORS = {"NVLink": 20.0, "PCIe": 1.0}
_TIMEOUT = 330.0  # seconds; the ranks' own timeouts are shorter

Pairs = dict[tuple[int, int], str]


def parallel(torch: Any, seen: list[DetectedGpu], env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Everything that only two GPUs or more have; nothing is run for fewer."""
    if len(seen) < 2:
        return []
    links: Pairs = {}

    def linked() -> Finding:
        links.update(among(topology(ask_topology()), visible(env, len(seen))))
        return describe(links)

    def peers() -> Finding:
        count = range(len(seen))
        apart = [(a, b) for a in count for b in count if a != b and not torch.cuda.can_device_access_peer(a, b)]
        return peer_access(apart, links)

    findings = [same_kind(seen)]
    findings += guarded("gpu links", linked, crash="warn")
    findings += guarded("peer access", peers, crash="warn")
    if SHARED.is_dir():
        findings += guarded("nccl memory", lambda: small_shared_memory(volume(SHARED).free, len(seen)), crash="warn")
    measured = guarded("all-reduce", lambda: measure(len(seen), env), seconds=_TIMEOUT + 45)
    return findings + [judge(found, links, len(seen)) for found in measured]


def same_kind(seen: list[DetectedGpu]) -> Finding:
    kinds = sorted({f"{card.name} {gib(card.memory_bytes)}" for card in seen})
    if len(kinds) == 1:
        return Finding("gpu kinds", "ok", f"{len(seen)} alike: {kinds[0]}", data={"kinds": kinds})
    first = [str(card.index) for card in seen if (card.name, card.memory_bytes) == (seen[0].name, seen[0].memory_bytes)]
    message = f"{' and '.join(kinds)}: the slowest sets the pace, and the smallest memory the micro batch"
    return Finding(
        "gpu kinds", "warn", message, f"use one kind: export CUDA_VISIBLE_DEVICES={','.join(first)}", {"kinds": kinds}
    )


def ask_topology() -> str:
    """What `nvidia-smi topo -m` prints; nothing where it cannot be asked."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def topology(text: str) -> Pairs:
    """How each pair of GPUs is linked (NV18, PIX, SYS …), by the driver's numbers. Network cards are left out."""
    columns: list[str] = []
    pairs: Pairs = {}
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()  # the header is underlined, in a pipe too
        if not columns:
            columns = words if words[:1] == ["GPU0"] and "X" not in words else []
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            cells = zip(columns, words[1:], strict=False)
            pairs |= {(int(words[0][3:]), int(to[3:])): how for to, how in cells if re.fullmatch(r"GPU\d+", to)}
    return {(a, b): how for (a, b), how in pairs.items() if a < b}


def visible(env: Mapping[str, str], count: int) -> list[int]:
    """The driver's numbers of the GPUs that torch sees, where CUDA_VISIBLE_DEVICES tells them as numbers."""
    listed = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    numbers = [int(word) for word in listed if word.isdigit()]
    return numbers if len(numbers) == len(listed) == count else list(range(count))


def among(pairs: Pairs, numbers: list[int]) -> Pairs:
    """The links between these GPUs, by torch's numbers."""
    places = {number: place for place, number in enumerate(numbers)}
    inside = {(places[a], places[b]): how for (a, b), how in pairs.items() if a in places and b in places}
    return {(min(pair), max(pair)): how for pair, how in inside.items()}


def link(pairs: Pairs) -> str | None:
    """The slowest link of an all-reduce over these GPUs: NVLink only where every pair has it."""
    if not pairs:
        return None
    return "NVLink" if all(how.startswith("NV") for how in pairs.values()) else "PCIe"


def describe(pairs: Pairs) -> Finding:
    kind = link(pairs)
    data = {"link": kind, "pairs": {f"{a}-{b}": how for (a, b), how in sorted(pairs.items())}}
    if kind is None:
        return Finding("gpu links", "ok", "unknown (nvidia-smi topo -m lists none)", data=data)
    ways = sorted(set(pairs.values()))
    if kind == "PCIe" and any(way.startswith("NV") for way in ways):
        joined = [f"{a},{b}" for (a, b), how in sorted(pairs.items()) if how.startswith("NV")]
        message = f"NVLink between some only ({', '.join(ways)}): an all-reduce over all GPUs goes through PCIe"
        return Finding("gpu links", "warn", message, f"for two GPUs: export CUDA_VISIBLE_DEVICES={joined[0]}", data)
    far = "; some pairs only across the CPUs, which is slowest" if kind == "PCIe" and {"SYS", "SOC"} & set(ways) else ""
    return Finding("gpu links", "ok", f"{kind} between all ({', '.join(ways)}){far}", data=data)


def peer_access(apart: list[tuple[int, int]], links: Pairs) -> Finding:
    """Many PCIe cards have none by design, and NCCL goes through shared memory; over NVLink its lack is a fault."""
    data = {"without": [list(pair) for pair in apart]}
    if not apart:
        return Finding("peer access", "ok", "every GPU reaches every other one's memory", data=data)
    message = f"none between {', '.join(f'{a} and {b}' for a, b in apart if a < b) or apart}"
    if any(links.get((min(pair), max(pair)), "").startswith("NV") for pair in apart):
        fix = "nvidia-smi nvlink -s shows dead links; restart the machine or rent another; until then: "
        return Finding(
            "peer access", "warn", f"{message}, though NVLink is there", fix + "export NCCL_P2P_DISABLE=1", data
        )
    return Finding(
        "peer access", "ok", f"{message}: NCCL goes through shared memory, as usual for such cards", data=data
    )


def small_shared_memory(free: int, gpus: int) -> list[Finding]:
    """The doctor looks at shared memory for every machine; this is what its size means for several GPUs."""
    if free >= GIB:
        return []
    message = f'{gib(free)} free of it for {gpus} GPUs: NCCL may stop with "No space left on device"'
    fix = "docker run --ipc=host (or --shm-size=8g); where you cannot: export NCCL_SHM_DISABLE=1"
    return [Finding("nccl memory", "warn", message, fix, {"free_bytes": free})]


def measure(ranks: int, env: Mapping[str, str] = os.environ, timeout: float = _TIMEOUT) -> Finding:
    """Measures an all-reduce over that many ranks under torchrun: NCCL where each has a GPU, else gloo."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "findings.json"
        launch = [
            "--standalone",
            "--nnodes=1",
            f"--nproc_per_node={ranks}",
            "-m",
            "sojourn.machine.probe_ranks",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, str(output)]
        torchrun = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(env)
        )
        try:
            stderr = torchrun.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # torchrun then stops its ranks, after 30 s at the latest
            stderr = torchrun.communicate(timeout=40)[1]
        finally:
            torchrun.kill()
        if not output.is_file():
            lines = [line for line in stderr.splitlines() if "Error" in line] or ["timed out"]
            return Finding(
                "all-reduce", "fail", f"could not be measured: {lines[-1].strip()[:200]}", suggest_fix(ranks)
            )
        findings = [Finding(**found) for found in json.loads(output.read_text(encoding="utf-8"))]
    # Without an all-reduce the ranks did not connect; the only finding says so.
    found = next((found for found in findings if found.name == "all-reduce"), findings[0])
    return replace(found, name="all-reduce")


def judge(found: Finding, pairs: Pairs, gpus: int) -> Finding:
    """The measured figure against what the link should give."""
    kind, speed = link(pairs), found.data.get("gb_per_s")
    if found.level == "fail" or kind is None or speed is None:
        return found
    message = f"{found.message} ({kind})"
    if speed < FLOORS[kind]:
        slow = f"{message}: far below what {kind} gives, so the GPUs do not use it"
        return Finding("all-reduce", "warn", slow, suggest_fix(gpus), found.data)
    return Finding("all-reduce", found.level, message, found.fix, found.data)


def suggest_fix(gpus: int) -> str:
    again = f"torchrun --nproc_per_node={gpus} -m sojourn doctor"
    return (
        f"NCCL_DEBUG=INFO {again} shows the transport; in a container: docker run --ipc=host (or --shm-size=8g); "
        f"where it hangs: NCCL_P2P_DISABLE=1 {again}, and if that helps, export it"
    )
