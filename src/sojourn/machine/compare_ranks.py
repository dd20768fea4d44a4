"""Whether several ranks can train one run together, judged from their facts alone; `probe_ranks.py` collects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sojourn.machine.finding import Finding, Level, gib

WAIT = "SOJOURN_DOCTOR_WAIT"  # seconds to wait for missing ranks
GIB = 1024**3

_LOCAL_FIX = (
    "put NCCL_P2P_DISABLE=1 before the command: if that helps, export it; in a container: docker run --ipc=host (or "
    "--shm-size=8g); NCCL_DEBUG=INFO before the command tells more"
)
NETWORK_FIX = (
    "on every machine: export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 with the name that `ip -br addr` shows "
    "for the fast network, and open all ports between the machines; NCCL_DEBUG=INFO before the command tells more"
)


@dataclass(frozen=True)
class RankFacts:
    """What one rank reports of itself; `seconds_off` is its clock's offset from rank 0's, give or take `within`."""

    rank: int
    host: str
    versions: dict[str, str | None]
    node: int = 0
    local_rank: int = 0
    gpu: str | None = None
    gpu_bytes: int = 0
    gpus_here: int = 0
    shared_free: int | None = None
    seconds_off: float = 0.0
    within: float = 0.0


@dataclass(frozen=True)
class AllReduceSpeed:
    """An all-reduce as one rank measured it: bus bandwidth, latency, and whether the sums were right."""

    gb_per_s: float = 0.0
    latency_us: float = 0.0
    right: bool = False
    error: str | None = None


def backend(known: Sequence[RankFacts]) -> str:
    return "nccl" if all(one.gpu for one in known) else "gloo"


def missing_ranks(missing: list[int], size: int, timeout: float, address: str) -> Finding:
    message = f"timed out after {timeout:g} s at {address} waiting for {_format_numbers(missing)} of {size}"
    fix = (
        "check on that machine whether it still runs and what it printed; check --nnodes, --node_rank and "
        "--master_addr; open all ports between the machines in the firewall; with several networks: export "
        f"NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0; to wait longer: export {WAIT}=600; for this machine alone: "
        "unset WORLD_SIZE"
    )
    return Finding("ranks", "fail", message, fix, {"missing": missing})


def compare(known: Sequence[RankFacts], address: str) -> list[Finding]:
    """Whether these ranks can train one run together."""
    message = f"{len(known)} on {_count(_nodes(known), 'machine')}, all connected to {address}: {_format_ranks(known)}"
    findings = [Finding("ranks", "ok", message, data={"facts": [asdict(one) for one in known]})]
    return [*findings, _versions(known), _cards(known), _clocks(known), *_shared(known)]


def judge_all_reduce(known: Sequence[RankFacts], speeds: Sequence[AllReduceSpeed]) -> Finding:
    """The measured all-reduce against the order of magnitude that the hardware should give."""
    several = _nodes(known) > 1
    fix = NETWORK_FIX if several else _LOCAL_FIX
    failed = [(one, speed) for one, speed in zip(known, speeds, strict=True) if speed.error]
    if failed:
        message = f"over {backend(known)} failed on {_format_ranks([one for one, _ in failed])}: {failed[0][1].error}"
        return Finding("all-reduce", "fail", message, fix, {"backend": backend(known)})
    slowest = min(speeds, key=lambda speed: speed.gb_per_s)
    latency = max(speed.latency_us for speed in speeds)
    data = {"backend": backend(known), "gb_per_s": round(slowest.gb_per_s, 3), "latency_us": round(latency, 1)}
    wrong = [one for one, speed in zip(known, speeds, strict=True) if not speed.right]
    if wrong:
        return Finding(
            "all-reduce", "fail", f"gives wrong sums on {_format_ranks(wrong)}: do not train with it", fix, data
        )
    message = f"{slowest.gb_per_s:.3g} GB/s over {backend(known)}, latency {latency:.0f} µs"
    floor = 0.0 if backend(known) == "gloo" else 0.5 if several else 1.0
    if slowest.gb_per_s < floor:
        slow = f"{message}: gradients of 1 GB take {2 / slowest.gb_per_s:.0f} s a step"
        return Finding("all-reduce", "warn", slow, fix, data)
    return Finding("all-reduce", "ok", message, data=data)


def _versions(known: Sequence[RankFacts]) -> Finding:
    differences, fixes = [], []
    differ = [name for name in known[0].versions if len(_by_version(known, name)) > 1]
    for name in differ:
        having = _by_version(known, name)
        # What most have, and rank 0 where that is undecided; never "missing".
        target = max(having, key=lambda version: (version is not None, len(having[version])))
        listed = [f"{version or 'missing'} on {_format_ranks(those)}" for version, those in having.items()]
        differences.append(f"{name} {', but '.join(listed)}")
        if not (name in ("CUDA", "NCCL") and "torch" in differ):  # those come with torch
            others = [one for one in known if one not in having[target]]
            cuda = having[target][0].versions.get("CUDA")
            fixes.append(f"on {', '.join(_hosts(others))}: {_install(name, str(target), cuda)}")
    if differ:
        return Finding("versions", "fail", "; ".join(differences), "; ".join(fixes), {"differ": differ})
    alike = ", ".join(f"{name} {version}" for name, version in known[0].versions.items() if version)
    return Finding("versions", "ok", f"the same everywhere: {alike}", data={"differ": []})


def _by_version(known: Sequence[RankFacts], name: str) -> dict[str | None, list[RankFacts]]:
    having: dict[str | None, list[RankFacts]] = {}
    for one in known:
        version = one.versions.get(name)
        if name == "python" and version:  # 3.11.4 and 3.11.9 work together
            version = ".".join(version.split(".")[:2])
        having.setdefault(version, []).append(one)
    return having


def _install(name: str, version: str, cuda: str | None) -> str:
    """The command that installs a version, or why none can."""
    if name == "python":
        return f"conda create -n sojourn python={version}"
    if name == "NCCL":
        return f"pip install --no-deps 'nvidia-nccl-cu{(cuda or '12').partition('.')[0]}=={version}'"
    public, _, tag = version.partition("+")
    if name == "CUDA" or (tag and not tag.startswith(("cu", "cpu"))) or "a0" in public:
        return "start from the same image as the others: pip cannot install this build of torch"
    index = f" --index-url https://download.pytorch.org/whl/{tag}" if tag else ""
    return f"pip install '{name}=={version}'{index}"


def _cards(known: Sequence[RankFacts]) -> Finding:
    without = [one for one in known if not one.gpu]
    if len(without) == len(known):
        return Finding("gpus", "ok", "none: the ranks compute on CPUs", data={"kinds": []})
    if without:
        few = [one for one in without if one.gpus_here]
        message = f"none for {_format_ranks(without)}, while others have one"
        fix = "rent machines with the same number of GPUs, or start fewer ranks there: --nproc_per_node"
        if few:
            fix = f"one rank per GPU: torchrun --nproc_per_node={few[0].gpus_here} on {few[0].host}"
        return Finding("gpus", "fail", message, fix)
    kinds: dict[str, list[RankFacts]] = {}
    for one in known:
        kinds.setdefault(f"{one.gpu} {gib(one.gpu_bytes)}", []).append(one)
    data = {"kinds": list(kinds)}
    if len(kinds) == 1:
        return Finding("gpus", "ok", f"{len(known)} alike: {next(iter(kinds))}", data=data)
    message = ", but ".join(f"{kind} on {_format_ranks(those)}" for kind, those in kinds.items())
    fix = "rent machines of one kind: the slowest sets the pace, and the smallest memory the micro batch"
    return Finding("gpus", "warn", message, fix, data)


def _clocks(known: Sequence[RankFacts]) -> Finding:
    worst = max(known, key=lambda one: abs(one.seconds_off) - one.within)
    data = {"seconds_off": {str(one.rank): round(one.seconds_off, 6) for one in known}}
    if abs(worst.seconds_off) - worst.within > 2:
        message = f"that of {worst.host} is {worst.seconds_off:+.1f} s off that of {known[0].host}: logs will not match"
        fix = f"on {worst.host}: sudo timedatectl set-ntp true (or: sudo ntpdate pool.ntp.org)"
        return Finding("clocks", "warn", message, fix, data)
    most = max(abs(one.seconds_off) + one.within for one in known)
    return Finding("clocks", "ok", f"within {most * 1000:.3g} ms of each other", data=data)


def _shared(known: Sequence[RankFacts]) -> list[Finding]:
    """Ranks of one machine may communicate through it; NCCL stops with "No space left on device" where it is small."""
    crowded = [one for one in known if sum((one.host, one.node) == (two.host, two.node) for two in known) > 1]
    sizes = [(one.shared_free, one) for one in crowded if one.shared_free is not None]
    if not sizes:
        return []
    least, where = min(sizes, key=lambda pair: pair[0])
    level: Level = "warn" if least < GIB and backend(known) == "nccl" else "ok"
    fix = "docker run --ipc=host (or --shm-size=8g); else: export NCCL_SHM_DISABLE=1" if level == "warn" else None
    message = f"{gib(least)} free on {where.host}" + (": NCCL may find it too small" if fix else "")
    return [Finding("shared memory", level, message, fix, {"least_free_bytes": least})]


def _nodes(known: Sequence[RankFacts]) -> int:
    return len({(one.host, one.node) for one in known})


def _hosts(known: Sequence[RankFacts]) -> list[str]:
    return list(dict.fromkeys(one.host for one in known))


def _format_ranks(known: Sequence[RankFacts]) -> str:
    """`a (ranks 0-3), b (ranks 4-7)`."""
    return ", ".join(
        f"{host} ({_format_numbers([one.rank for one in known if one.host == host])})" for host in _hosts(known)
    )


def _format_numbers(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number != 1 else "")
