"""Installs on a box, sends a run there and starts it: the box needs nobody afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sojourn.errors import RunFailed, UserError
from sojourn.remote.bootstrap import bootstrap
from sojourn.remote.box_client import Box
from sojourn.remote.box_doctor import examine
from sojourn.remote.hosts import Host
from sojourn.remote.job import BoxPaths, Job
from sojourn.remote.portability import Destination, Shipment
from sojourn.remote.spec import Terms, platform_facts, write_job

Say = Callable[[str], None]
_PROGRAMS = ("supervisor.py", "report.py")  # of remote/box/
_SOURCES = Path(__file__).parent / "box"


@dataclass(frozen=True)
class Options:
    """`detach`: return once the run trains. `prepare_here`: the laptop prepares the data where it can. `nodes`: how
    many of the hosts train together. `gpu`, `gpu_count`, `to_yaml`: for places that choose the machine."""

    terms: Terms
    detach: bool = False
    allow_secrets: bool = False
    prepare_here: bool = True
    install_torch: bool = False
    nodes: int = 1
    gpu: str | None = None
    gpu_count: int = 1
    to_yaml: Path | None = None


def start(box: Box, job: Job, shipment: Shipment, options: Options, say: Say) -> None:
    """Installs, sends and starts; the box needs nobody afterwards."""
    python = bootstrap(box, box.host, say, install_torch=options.install_torch)
    if box.host.gpus and not python.cuda_available and shipment.config.train.device != "cpu":
        raise UserError(
            f"{box.host.name}: its torch {python.torch} cannot use its {box.host.gpu}; the run would train on the CPU; "
            "rent an image with a CUDA torch, or add --install-torch, or train.device=cpu"
        )
    if python.fresh:
        found = examine(box, box.host, python)
        for line in (f"{box.host.name}: sojourn doctor: {found.describe()}", *found.problems):
            say(line)
    send_shipment(box, shipment)
    write_job(box, job, options.terms, shipment, python)
    job.save()
    start_supervisor(box, job, python.python)
    say(f"{job.run} runs on {box.host.name}, whatever happens to this machine (logs: sojourn logs {job.run} -f)")


def send_shipment(box: Box, shipment: Shipment) -> None:
    """Our programs, the run's files, and last the mark that its prepared data is complete."""
    tools = BoxPaths(box.host).tools
    for name in _PROGRAMS:
        box.write_bytes(f"{tools}/{name}", (_SOURCES / name).read_bytes())
    for items in (shipment.items, shipment.last_items):
        if items:
            box.push(list(items), box.progress(f"sending {len(items)} files to {box.host.name}"))


def start_supervisor(box: Box, job: Job, python: str) -> None:
    paths = BoxPaths(box.host, job.run)
    done = box.run([python, f"{paths.tools}/supervisor.py", "start", paths.job], timeout=60)
    if done.code != 0:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunFailed(
            f"{box.host.name}: the supervisor did not start: {why}; its log is {paths.job}/logs/supervisor.log"
        )


def destination(host: Host) -> Destination:
    disks = tuple(disk.path for disk in platform_facts(host).disks if disk.survives != "session")
    return Destination(host.home, host.gpus, disks)


def split_gpu(text: str | None) -> tuple[str | None, int]:
    """`A100:2` is a GPU and how many of it."""
    name, _, count = (text or "").partition(":")
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count[:4]) <= 1024):
        raise UserError(f"--gpu: “{text}”: after the colon comes a number of GPUs, such as A100:2")
    return name or None, int(count or 1)
