"""The machine: platforms recognised from fake roots, limits of containers, GPUs through the driver, precision."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sojourn.errors import UserError
from sojourn.machine import gpus as machine_gpus
from sojourn.machine import hardware
from sojourn.machine.platform import detect, find_home, is_persistent, persistent_home
from sojourn.machine.precision import choose_device, choose_precision, cpu_bf16_feature, has_kernels, wheel_for


def box(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return root


@pytest.mark.parametrize(
    ("env", "folders", "name", "home"),
    [
        ({}, ["/root/autodl-tmp", "/root/autodl-fs"], "autodl", "/root/autodl-tmp"),
        ({"AutoDLContainerUUID": "x"}, ["/root/autodl-fs"], "autodl", "/root/autodl-fs"),
        ({}, ["/hy-tmp", "/hy-public", "/hy-nas"], "gpushare", "/hy-nas"),
        ({}, ["/hy-tmp", "/hy-netdisk"], "gpushare", "/hy-netdisk"),
        ({}, ["/public/script", "/mnt"], "matpool", "/mnt"),
        ({}, ["/home/featurize/work"], "featurize", "/home/featurize/work"),
        ({"DSW_INSTANCE_ID": "x"}, ["/mnt/workspace"], "dsw", "/mnt/workspace"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, ["/kaggle/working"], "kaggle", "/kaggle/working"),
        (
            {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "r"},
            ["/kaggle/working"],
            "kaggle",
            "/kaggle/working",
        ),
        ({"COLAB_GPU": "1"}, ["/content/drive/MyDrive"], "colab", "/content/drive/MyDrive/sojourn"),
        ({"PAPERSPACE_FQDN": "x"}, ["/storage", "/notebooks"], "paperspace", "/storage"),
        ({"SPACE_ID": "a/b"}, ["/data"], "hf-spaces", "/data"),
    ],
)
def test_each_platform_is_recognised_and_its_lasting_folder_found(tmp_path, env, folders, name, home):
    root = box(tmp_path, *folders)
    here = detect(env, root)
    assert here.name == name
    found = find_home(here, root)
    assert found.path == root / home.lstrip("/") and found.warning is None
    assert persistent_home(env, root) == found.path
    assert is_persistent(here, found.path / "runs" / "first", root) is True


@pytest.mark.parametrize(
    ("env", "folders", "home"),
    [({"COLAB_RELEASE_TAG": "r"}, ["/content"], "/content"), ({}, ["/hy-tmp"], "/hy-tmp")],
)
def test_where_only_a_wiped_folder_is_there_it_is_used_with_a_warning(tmp_path, env, folders, home):
    root = box(tmp_path, *folders)
    here = detect(env, root)
    found = find_home(here, root)
    assert found.path == root / home.lstrip("/")
    assert found.warning and "does not survive" in found.warning and found.fix
    assert is_persistent(here, found.path, root) is False


def test_a_laptop_is_generic_and_keeps_runs_where_the_user_works(tmp_path):
    here = detect({}, tmp_path)
    assert here.name == "generic" and not here.is_known
    assert persistent_home({}, tmp_path) is None
    assert is_persistent(here, tmp_path, tmp_path) is None


def test_a_space_without_a_bought_disk_has_no_home_and_says_so(tmp_path):
    found = find_home(detect({"SPACE_ID": "a/b"}, tmp_path), tmp_path)
    assert found.path is None and found.warning and "/data" in found.warning


def test_featurize_keeps_work_but_not_the_rest_of_its_home_folder(tmp_path):
    root = box(tmp_path, "/home/featurize/work")
    here = detect({}, root)
    assert is_persistent(here, root / "home/featurize/work" / "runs", root) is True
    assert is_persistent(here, root / "home/featurize/project", root) is False
    assert is_persistent(here, root / "opt", root) is False


@pytest.mark.skipif(sys.platform == "win32", reason="symlinks need rights on Windows")
def test_a_folder_that_is_a_link_to_the_lasting_disk_survives(tmp_path):
    root = box(tmp_path, "/root/autodl-tmp/code", "/home")
    (root / "home/project").symlink_to(root / "root/autodl-tmp/code")
    assert is_persistent(detect({}, root), root / "home/project/runs", root) is True


def test_finding_the_home_imports_nothing_heavy():
    code = "import sys; from sojourn.machine.platform import persistent_home; persistent_home(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "psutil", "pydantic", "rich"} & set(modules)


@pytest.mark.parametrize(
    ("files", "cpus", "limit", "used"),
    [
        (
            {
                "cpu.max": "150000 100000",
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "inactive_file 200",
            },
            1.5,
            1000,
            500,
        ),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "400000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "2000",
                "memory/memory.usage_in_bytes": "10",
            },
            4.0,
            2000,
            10,
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            None,
            None,
            None,
        ),
    ],
)
def test_a_containers_limits_are_read_from_either_kind_of_control_group(tmp_path, files, cpus, limit, used):
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert hardware.cgroup_cpus(tmp_path) == cpus
    assert hardware.cgroup_memory(tmp_path) == (limit, used)


def test_a_limit_on_a_parent_group_binds_too(tmp_path):
    inner = tmp_path / "sys/fs/cgroup/pod/box"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("200000 100000\n")
    assert hardware.cgroup_cpus(tmp_path) == 2.0


def test_the_container_limit_is_what_the_machine_is_said_to_have(tmp_path):
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(str(64 * 1024**2))
    (folder / "cpu.max").write_text("50000 100000")
    assert hardware.memory(tmp_path).limit == 64 * 1024**2
    assert hardware.cpu(tmp_path).usable == 0.5
    assert hardware.cpu(tmp_path).limited_by


def test_a_volume_is_measured_at_the_nearest_folder_that_exists(tmp_path):
    seen = hardware.volume(tmp_path / "not" / "yet" / "there")
    assert seen.path == tmp_path and 0 < seen.free <= seen.total


SMI = """#!/bin/sh
case "$*" in
  *compute_cap*) {with_cap} ;;
  *query-gpu*) echo "0, Tesla T4, 15360, 3, 450.80" ;;
  *) echo "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |" ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a stand-in for the driver's tool first on the PATH."""
    if sys.platform == "win32":
        pytest.skip("a shell script stands in for nvidia-smi")

    def write(text: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(text)
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return write


def test_gpus_are_seen_through_the_driver_without_torch(smi):
    two = 'echo "0, NVIDIA GeForce RTX 4090, 24564, 1, 550.54, 8.9"; echo "1, Tesla T4, [N/A], [N/A], 550.54, 7.5"'
    smi(SMI.format(with_cap=two))
    first, second = machine_gpus.driver_gpus()
    assert (first.name, first.capability, first.driver, first.cuda) == (
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        "550.54",
        (12, 4),
    )
    assert first.memory_gib == pytest.approx(24, abs=0.1)
    assert second.memory_bytes == 0 and second.used_bytes is None


def test_an_old_driver_that_does_not_know_compute_cap_is_still_read(smi):
    smi(SMI.format(with_cap='echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2'))
    (only,) = machine_gpus.driver_gpus()
    assert only.name == "Tesla T4" and only.capability is None


def test_a_broken_driver_is_reported_in_one_line(smi):
    smi("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate'\nexit 9\n")
    with pytest.raises(RuntimeError, match="could not communicate"):
        machine_gpus.driver_gpus()


def test_no_nvidia_smi_means_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_gpus.driver_gpus() == []


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "bf16"), ((8, 9), "bf16"), ((12, 0), "bf16"), ((7, 5), "fp16")]
)
def test_a_gpu_trains_in_the_format_its_hardware_has(capability, name):
    chosen, reason = choose_precision("cuda", capability)
    assert chosen == name and f"{capability[0]}.{capability[1]}" in reason


def test_a_t4_says_why_it_is_fp16():
    assert "no bf16" in choose_precision("cuda", (7, 5))[1]


def test_a_p100_is_refused_with_what_to_take_instead():
    with pytest.raises(UserError, match=r"6\.0.*T4"):
        choose_precision("cuda", (6, 0))


def test_torch_runs_on_the_same_generation_or_through_ptx_only():
    assert has_kernels((8, 9), ["sm_80", "sm_86"])
    assert not has_kernels((12, 0), ["sm_80", "sm_90"])
    assert has_kernels((12, 0), ["sm_80", "compute_90"])
    assert not has_kernels((6, 0), ["sm_75", "sm_80", "sm_90a", "compute_120"])


def test_the_suggested_torch_build_suits_driver_and_card():
    assert wheel_for((11, 8), (8, 6)) == "cu118"
    assert wheel_for((12, 4), (8, 9)) == "cu126"
    assert wheel_for((12, 8), (12, 0)) == "cu128"
    assert wheel_for((13, 0), (9, 0)) == "cu130"
    assert wheel_for((13, 0), (7, 0)) == "cu126"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_bf16_on_the_cpu_needs_the_instructions_for_it(tmp_path):
    info = tmp_path / "cpuinfo"
    for flags, feature in [
        ("flags : fpu avx512f amx_bf16", "AMX"),
        ("flags : fpu avx512_bf16", "AVX512_BF16"),
        ("Features : fp asimd bf16", "ARM BF16"),
        ("flags : fpu avx2", None),
    ]:
        info.write_text(flags + "\n")
        assert cpu_bf16_feature(info) == feature
    assert cpu_bf16_feature(tmp_path / "missing") is None


def test_a_cpu_without_bf16_instructions_trains_in_fp32():
    chosen, reason = choose_precision("cpu")
    assert chosen in ("fp32", "bf16") and reason
    if cpu_bf16_feature() is None:
        assert chosen == "fp32"


def test_a_device_that_is_not_there_is_an_error_and_auto_is_not():
    torch = pytest.importorskip("torch")
    assert choose_device("auto") in ("cuda", "mps", "cpu")
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UserError, match="unknown device 'tpu'"):
        choose_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="sojourn doctor"):
            choose_device("cuda")
