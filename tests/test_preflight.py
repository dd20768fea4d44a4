"""Before several GPUs or machines train together: differences are named with a fix, and an all-reduce is measured."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from conftest import clean_environment, sojourn
from fork_server import Child, ForkServer
from sojourn.errors import UserError
from sojourn.machine import probe_parallel
from sojourn.machine.compare_ranks import AllReduceSpeed, RankFacts, compare, judge_all_reduce, missing_ranks
from sojourn.machine.doctor import exit_code, next_step
from sojourn.machine.finding import Finding
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.probe_ranks import is_multi_rank

GIB = 1024**3
VERSIONS = {"python": "3.11.7", "sojourn": "0.1.0", "torch": "2.7.1+cu128", "peft": "0.17.0", "CUDA": "12.8"}
VERSIONS |= {"NCCL": "2.26.2"}
FAST = AllReduceSpeed(200.0, 30.0, True)


def rank_facts(rank: int, host: str = "a", **changed: object) -> RankFacts:
    plain = RankFacts(rank, host, VERSIONS, local_rank=rank, gpu="NVIDIA H100", gpu_bytes=80 * GIB, gpus_here=8)
    return replace(plain, shared_free=64 * GIB, **changed)


def other_versions(**changed: str | None) -> dict[str, str | None]:
    return {**VERSIONS, **changed}


def found(*known: RankFacts) -> dict[str, Finding]:
    return {finding.name: finding for finding in compare(known, "a:29500")}


def test_ranks_that_are_alike_pass():
    findings = compare([rank_facts(0), rank_facts(1), rank_facts(2, "b", node=1)], "a:29500")
    assert {finding.level for finding in findings} == {"ok"}
    assert findings[0].message == "3 on 2 machines, all connected to a:29500: a (ranks 0-1), b (rank 2)"
    assert exit_code(findings) == 0 and "sojourn train" in next_step(findings)


def test_another_version_on_one_machine_fails_and_names_who_has_what_and_the_line_that_mends_it():
    odd = other_versions(torch="2.6.0+cu124", CUDA="12.4", NCCL="2.21.5", peft=None)
    told = found(rank_facts(0), rank_facts(1), rank_facts(2, "b", versions=odd))["versions"]
    assert told.level == "fail" and told.data["differ"] == ["torch", "peft", "CUDA", "NCCL"]
    assert "torch 2.7.1+cu128 on a (ranks 0-1), but 2.6.0+cu124 on b (rank 2)" in told.message
    assert "peft 0.17.0 on a (ranks 0-1), but missing on b (rank 2)" in told.message
    torch = "pip install 'torch==2.7.1+cu128' --index-url https://download.pytorch.org/whl/cu128"
    assert told.fix == f"on b: {torch}; on b: pip install 'peft==0.17.0'"


def test_what_most_have_is_the_version_to_install_and_a_missing_one_never_is():
    odd, none = other_versions(peft="0.18.0"), other_versions(peft=None)
    fix = found(rank_facts(0), rank_facts(1, "b", versions=odd), rank_facts(2, "c", versions=odd))["versions"].fix
    assert fix == "on a: pip install 'peft==0.18.0'"
    fix = found(rank_facts(0, versions=none), rank_facts(1, "b", versions=none), rank_facts(2, "c"))["versions"].fix
    assert fix == "on a, b: pip install 'peft==0.17.0'"


def test_versions_that_pip_cannot_bring_have_a_mend_of_their_own():
    image = other_versions(torch="2.6.0a0+df5bbc09d1.nv24.11")
    assert "same image" in (found(rank_facts(0, versions=image), rank_facts(1, "b"))["versions"].fix or "")
    nccl = found(rank_facts(0), rank_facts(1, "b", versions=other_versions(NCCL="2.27.3")))["versions"]
    assert nccl.fix == "on b: pip install --no-deps 'nvidia-nccl-cu12==2.26.2'"
    assert found(rank_facts(0), rank_facts(1, "b", versions=other_versions(python="3.11.9")))["versions"].level == "ok"
    python = found(rank_facts(0), rank_facts(1, "b", versions=other_versions(python="3.12.1")))["versions"]
    assert python.level == "fail" and python.fix == "on b: conda create -n sojourn python=3.11"


def test_a_clock_that_is_off_by_more_than_the_measurement_explains_is_a_warning():
    off = found(rank_facts(0), rank_facts(1, "b", seconds_off=-30.0, within=0.001))["clocks"]
    assert off.level == "warn" and "b is -30.0 s off that of a" in off.message
    assert "timedatectl" in (off.fix or "") and "ntpdate" in (off.fix or "")
    assert found(rank_facts(0), rank_facts(1, "b", seconds_off=1.9, within=0.001))["clocks"].level == "ok"
    assert found(rank_facts(0), rank_facts(1, "b", seconds_off=5.0, within=4.0))["clocks"].level == "ok"


def test_gpus_of_several_kinds_warn_and_a_process_without_one_fails():
    mixed = found(rank_facts(0), rank_facts(1, "b", gpu="NVIDIA A100"))["gpus"]
    assert mixed.level == "warn" and "NVIDIA A100 80 GiB on b (rank 1)" in mixed.message
    crowded = found(rank_facts(0, gpus_here=1), rank_facts(1, gpu=None, gpu_bytes=0, gpus_here=1))["gpus"]
    assert crowded.level == "fail" and crowded.fix == "one rank per GPU: torchrun --nproc_per_node=1 on a"
    assert found(rank_facts(0), rank_facts(1, "b", gpu=None, gpus_here=0))["gpus"].level == "fail"
    assert found(rank_facts(0, gpu=None), rank_facts(1, "b", gpu=None))["gpus"].level == "ok"


def test_small_shared_memory_matters_to_ranks_of_one_machine():
    tight = replace(rank_facts(1), shared_free=64 * 1024**2)
    assert found(rank_facts(0), tight)["shared memory"].level == "warn"
    assert "--shm-size" in (found(rank_facts(0), tight)["shared memory"].fix or "")
    assert "shared memory" not in found(rank_facts(0), replace(tight, host="b"))


def test_the_measured_sum_is_judged_by_what_the_hardware_should_give():
    one, two = [rank_facts(0), rank_facts(1)], [rank_facts(0), rank_facts(1, "b")]
    cpus = [replace(known, gpu=None) for known in one]
    slow = replace(FAST, gb_per_s=0.7)
    assert judge_all_reduce(one, [FAST, FAST]).level == "ok"
    assert judge_all_reduce(one, [FAST, slow]).level == "warn" and "P2P_DISABLE" in (
        judge_all_reduce(one, [FAST, slow]).fix or ""
    )
    assert judge_all_reduce(two, [slow, slow]).level == judge_all_reduce(cpus, [slow, slow]).level == "ok"
    slower = judge_all_reduce(two, [slow, replace(FAST, gb_per_s=0.1)])
    assert slower.level == "warn" and "NCCL_SOCKET_IFNAME" in (slower.fix or "") and "20 s a step" in slower.message
    wrong = judge_all_reduce(one, [FAST, replace(FAST, right=False)])
    assert wrong.level == "fail" and "wrong sums on a (rank 1)" in wrong.message
    hung = judge_all_reduce(two, [FAST, AllReduceSpeed(error="timed out after 90 s")])
    assert hung.level == "fail" and "b (rank 1): timed out" in hung.message


def test_missing_ranks_are_named_with_what_to_type():
    told = missing_ranks([1, 2, 3, 7], 8, 120, "a:29500")
    assert told.message == "timed out after 120 s at a:29500 waiting for ranks 1-3, 7 of 8"
    for word in ("firewall", "--master_addr", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert word in (told.fix or "")


NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\t0-31,64-95\t0\t\tN/A\n"
    "NIC0\tPIX\tNODE\t X \n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
PCIE = """        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity    NUMA Affinity
GPU0     X      PIX     PHB     SYS     SYS     0-27,56-83      0
GPU1    PIX      X      SYS     SYS     SYS     0-27,56-83      0
GPU2    PHB     SYS      X      PXB     PIX     28-55,84-111    1
GPU3    SYS     SYS     PXB      X      PIX     28-55,84-111    1
mlx5_0  SYS     SYS     PIX     PIX      X
"""


def test_links_are_read_from_the_drivers_matrix():
    assert probe_parallel.topology(NVLINK) == {(0, 1): "NV18"}
    pairs = probe_parallel.topology(PCIE)
    assert pairs == {(0, 1): "PIX", (0, 2): "PHB", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "PXB"}
    assert probe_parallel.topology("") == probe_parallel.topology("No devices were found\n") == {}


def test_links_are_reported_for_the_gpus_that_torch_sees():
    pairs = probe_parallel.topology(PCIE)
    assert probe_parallel.visible({"CUDA_VISIBLE_DEVICES": "3, 2"}, 2) == [3, 2]
    assert probe_parallel.visible({"CUDA_VISIBLE_DEVICES": "GPU-5895e020"}, 1) == probe_parallel.visible({}, 1) == [0]
    assert probe_parallel.among(pairs, [3, 2]) == {(0, 1): "PXB"}
    assert probe_parallel.among(pairs, [0, 2, 1])[1, 2] == "SYS"


def test_the_kind_of_link_is_reported_and_a_mixture_is_a_warning():
    assert "NVLink between all (NV18)" in probe_parallel.describe({(0, 1): "NV18"}).message
    across = probe_parallel.describe(probe_parallel.topology(PCIE))
    assert across.level == "ok" and across.data["link"] == "PCIe" and "across the CPUs" in across.message
    mixed = probe_parallel.describe({(0, 1): "SYS", (0, 2): "SYS", (1, 2): "NV12"})
    assert mixed.level == "warn" and mixed.fix == "for two GPUs: export CUDA_VISIBLE_DEVICES=1,2"
    assert probe_parallel.describe({}).level == "ok" and probe_parallel.describe({}).data["link"] is None


@pytest.mark.parametrize(
    ("how", "speed", "level"), [("NV18", 19, "warn"), ("NV18", 21, "ok"), ("PHB", 0.9, "warn"), ("PHB", 1.1, "ok")]
)
def test_a_sum_far_below_its_link_is_a_warning(how, speed, level):
    measured = Finding("all-reduce", "ok", f"{speed} GB/s", data={"gb_per_s": speed})
    told = probe_parallel.judge(measured, {(0, 1): how}, 2)
    assert told.level == level
    words = ("NCCL_P2P_DISABLE=1", "NCCL_DEBUG=INFO", "--shm-size", "--ipc=host")
    assert all((word in (told.fix or "")) == (level == "warn") for word in words)


def test_lacking_peer_access_is_a_fault_only_over_nvlink():
    assert probe_parallel.peer_access([], {}).level == "ok"
    assert probe_parallel.peer_access([(0, 1), (1, 0)], {(0, 1): "PHB"}).level == "ok"
    fault = probe_parallel.peer_access([(1, 0)], {(0, 1): "NV4"})
    assert fault.level == "warn" and "NCCL_P2P_DISABLE=1" in (fault.fix or "")


def test_gpus_of_two_kinds_in_one_machine_are_a_warning():
    first = DetectedGpu(0, "NVIDIA L4", 24 * GIB, 0, (8, 9), None, None, "torch")
    assert probe_parallel.same_kind([first, replace(first, index=1)]).level == "ok"
    mixed = probe_parallel.same_kind([first, replace(first, index=1, name="Tesla T4"), replace(first, index=2)])
    assert mixed.level == "warn" and (mixed.fix or "").endswith("CUDA_VISIBLE_DEVICES=0,2")
    assert probe_parallel.small_shared_memory(64 * 1024**2, 2)[0].level == "warn"
    assert probe_parallel.small_shared_memory(2 * GIB, 2) == []


def test_fewer_than_two_gpus_are_asked_nothing_and_need_no_torch():
    one = DetectedGpu(0, "NVIDIA L4", 24 * GIB, 0, (8, 9), None, None, "torch")
    assert probe_parallel.parallel(None, [one]) == probe_parallel.parallel(None, []) == []
    code = "import sys, sojourn.machine.probe_ranks, sojourn.machine.probe_parallel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_half_an_environment_of_torchrun_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"RANK, MASTER_ADDR, MASTER_PORT not set.*unset WORLD_SIZE"):
        is_multi_rank({"WORLD_SIZE": "2"})
    assert not is_multi_rank({}) and not is_multi_rank({"WORLD_SIZE": "1"})


def test_the_help_tells_of_torchrun():
    assert "torchrun --nproc_per_node" in sojourn("doctor", "--help").stdout


# Processes of their own from here on, on CPUs: gloo sums as NCCL does.
ALONE = {name: value for name, value in clean_environment().items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ALONE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
TORCHRUN = "from torch.distributed.run import main; main()"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def forked(fork_server: ForkServer) -> Callable[..., Child]:
    """`sojourn doctor` as one of several processes, without torchrun."""

    def start(rank: int, port: int, *args: str, size: int = 2, preamble: str = "", **env: str) -> Child:
        met = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return fork_server.start("doctor", *args, preamble=preamble, env={**ALONE, **met, **env})

    return start


def test_under_torchrun_the_ranks_are_compared_and_rank_0_alone_reports(fork_server, tmp_path):
    ranks = ["--standalone", "--nproc_per_node=2", "-m", "sojourn", "doctor", "--json", "--home", str(tmp_path)]
    done = fork_server.run(*ranks, env=ALONE, code=TORCHRUN, fork_children=True)
    told = json.loads(done.stdout)  # one object, so one process spoke
    assert done.returncode == 0 == told["summary"]["fail"], done.stderr
    findings = {finding["name"]: finding for finding in told["findings"]}
    assert list(findings) == ["ranks", "versions", "gpus", "clocks", "shared memory", "all-reduce"]
    assert [one["rank"] for one in findings["ranks"]["data"]["facts"]] == [0, 1]
    assert findings["ranks"]["data"]["facts"][1]["versions"]["torch"]
    assert abs(findings["clocks"]["data"]["seconds_off"]["1"]) < 1
    assert findings["all-reduce"]["data"]["gb_per_s"] > 0.001 and findings["all-reduce"]["data"]["latency_us"] > 1


def test_a_real_difference_in_version_and_clock_is_found_and_all_leave_with_the_same_code(forked, tmp_path):
    """The second process has another peft before its own in the path, and a clock that is ten seconds ahead."""
    (tmp_path / "peft-0.0.1.dist-info").mkdir()
    (tmp_path / "peft-0.0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
    other = f"import sys, time; sys.path.insert(0, {str(tmp_path)!r}); now = time.time; time.time = lambda: now() + 10"
    port = free_port()
    first, second = (forked(rank, port, "--json", preamble=other if rank else "") for rank in (0, 1))
    said, trouble = first.communicate(timeout=120)
    silence = second.communicate(timeout=120)
    findings = {finding["name"]: finding for finding in json.loads(said)["findings"]}
    assert findings["versions"]["data"]["differ"] == ["peft"] and "0.0.1" in findings["versions"]["message"]
    assert findings["clocks"]["level"] == "warn" and "+10.0 s" in findings["clocks"]["message"]
    assert (first.returncode, second.returncode) == (1, 1) and not trouble and silence == ("", "")


def test_a_process_that_never_comes_is_named_in_bounded_time(forked):
    """Once it is the second that is missing, and the first waits; once the first, and there is nobody to meet."""
    one, two = free_port(), free_port()
    first = forked(0, one, size=3, SOJOURN_DOCTOR_WAIT="1")
    lone = forked(1, two, SOJOURN_DOCTOR_WAIT="1")
    said, trouble = first.communicate(timeout=60)
    assert f"timed out after 1 s at 127.0.0.1:{one} waiting for ranks 1-2 of 3" in said and "firewall" in said
    assert first.returncode == 1 and not trouble
    said, trouble = lone.communicate(timeout=60)
    assert f"cannot connect to 127.0.0.1:{two}" in said and "--master_addr" in said
    assert lone.returncode == 1 and not trouble


def test_when_the_first_never_comes_the_next_one_says_so_and_the_others_are_silent(forked):
    from torch.distributed import TCPStore

    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps it for its processes
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "SOJOURN_DOCTOR_WAIT": "2"}
    second, third = (forked(rank, kept.port, size=3, **env) for rank in (1, 2))
    assert "waiting for rank 0 of 3" in second.communicate(timeout=60)[0]
    assert third.communicate(timeout=60) == ("", "")
    assert (second.returncode, third.returncode) == (1, 1)


def test_an_all_reduce_that_hangs_is_a_finding_and_the_ranks_exit(forked):
    stuck = (
        "import time\nfrom sojourn.machine import probe_ranks\nprobe_ranks._ALL_REDUCE_TIMEOUT = 2\n"
        "if rank == 1: probe_ranks._measure = lambda *_: time.sleep(100)"
    )
    port = free_port()
    first, second = (forked(rank, port, "--json", preamble=stuck) for rank in (0, 1))
    findings = {finding["name"]: finding for finding in json.loads(first.communicate(timeout=60)[0])["findings"]}
    assert findings["all-reduce"]["level"] == "fail" and "timed out after 2 s" in findings["all-reduce"]["message"]
    assert findings["versions"]["level"] == "ok"
    assert (first.returncode, second.wait(timeout=20)) == (1, 1)


# As `subprocess` of the module that starts torchrun: a fork of the fork server, whose ranks are forks of it.
class ForkedTorchrun:
    def __init__(self, fork_server: ForkServer, command: list[str], env: dict[str, str]) -> None:
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        self._child = fork_server.start(*command[3:], env=env, code=TORCHRUN, fork_children=True)
        self.kill = self._child.kill

    def communicate(self, timeout: float) -> tuple[str, str]:
        return self._child.communicate(timeout)


@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "new Pythons"])
def test_a_machine_with_two_gpus_has_its_links_told_and_its_sum_really_measured(fork_server, monkeypatch, really):
    """Two cards that are not here: torch's word on peer access is given, and the processes sum on CPUs."""
    if not really:
        names = {name: getattr(subprocess, name) for name in ("run", "PIPE", "DEVNULL", "TimeoutExpired")}
        forked = lambda command, env, **_: ForkedTorchrun(fork_server, command, env)  # noqa: E731
        monkeypatch.setattr(probe_parallel, "subprocess", SimpleNamespace(Popen=forked, **names))
    card = DetectedGpu(0, "NVIDIA L4", 24 * GIB, 0, (8, 9), None, None, "torch")
    torch = SimpleNamespace(cuda=SimpleNamespace(can_device_access_peer=lambda a, b: a < b))
    told = {found.name: found for found in probe_parallel.parallel(torch, [card, replace(card, index=1)], ALONE)}
    assert list(told) == ["gpu kinds", "gpu links", "peer access", "all-reduce"]
    assert told["peer access"].data == {"without": [[1, 0]]}
    assert (told["all-reduce"].level, told["all-reduce"].data["backend"]) == ("ok", "gloo")
    assert told["all-reduce"].data["gb_per_s"] > 0.001


def test_a_gang_that_cannot_start_is_a_finding_with_a_mend(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libnccl.so.2: not found')")
    told = probe_parallel.measure(2, {**ALONE, "PYTHONPATH": str(tmp_path)})
    assert told.level == "fail" and "libnccl.so.2: not found" in told.message and told.fix
