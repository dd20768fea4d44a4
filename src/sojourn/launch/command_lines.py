"""The exact commands that start one run on several nodes, for a shell and for Slurm; nothing is started here.

A wrong node rank, port or quote costs an hour of idle GPUs, so the commands are generated and tested. Jobs for
Kubernetes are in `kubernetes.py`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError

TORCHRUN_GRACE = 30  # seconds from a signal until torchrun kills its workers; no flag changes that
_SLURM_EARLY = 60  # seconds: Slurm checks time limits once a minute and may send a signal this early
# Without it a node that rejoins never learns the store's address: torchrun shares it in the first round only.
_ALLOW_REJOIN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\]")
_SECRETS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|://[^/\s@]*:[^/\s@]+@|\b(api_?key|password|secret|\w*_token)=.", re.I)


@dataclass(frozen=True)
class Launch:
    """One run on `nodes` nodes of `gpus` ranks each; `args` follow `sojourn train`. `grace` in seconds."""

    name: str
    args: tuple[str, ...]
    nodes: int
    gpus: int
    master: str | None = None
    port: int = 29500
    max_restarts: int = 3
    image: str | None = None
    grace: float = 30.0


def refuse_secrets(args: Sequence[str]) -> None:
    """Called before anything parses the arguments: error messages and `ps` would show them."""
    if any(_SECRETS.search(arg) for arg in args):
        raise UserError(
            "command line: an argument looks like a secret, and secrets do not belong in a command; "
            "set it in the environment of every node instead, such as HF_TOKEN"
        )


def check_launch(launch: Launch, config: RunConfig) -> list[str]:
    """Refuses what could not run; returns notes for the user."""
    batch, size = config.train.global_batch, launch.nodes * launch.gpus
    if batch < size:
        raise UserError(
            f"train.global_batch: {batch} rows cannot be shared by {size} ranks ({launch.nodes} × {launch.gpus}); "
            f"set train.global_batch={size}"
        )
    if launch.nodes > 1 and isinstance(config.parallel.gpus, list):
        raise UserError(
            "parallel.gpus: on several nodes each rank uses the GPU of its local rank; remove it and give the number "
            f"of GPUs per node: --gpus-per-node {len(config.parallel.gpus)}"
        )
    if launch.master is not None and not _HOST.fullmatch(launch.master):
        raise UserError("--master: takes a host name or an address, without a port, such as --master 192.168.1.1")
    notes = []
    if launch.grace > TORCHRUN_GRACE and launch.nodes > 1:
        notes.append(
            f"torchrun kills its workers {TORCHRUN_GRACE} s after a signal; limits.grace={config.limits.grace} "
            "does not change that"
        )
    return notes


def shell_commands(launch: Launch) -> dict[str, Any]:
    """`own`: `sojourn train`, one line per node. With torchrun: `check` and `every`, the same line on every node;
    `by_rank`, one line per node with its rank."""
    if launch.nodes == 1:
        return {"every": shlex.join(["sojourn", "train", *launch.args])}
    if launch.master is None:
        raise UserError(
            "--master: give the address of the first node, as all nodes reach it, such as --master 192.168.1.1"
        )
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-id={launch.name}",
        f"--rdzv-endpoint={launch.master}:{launch.port}",
    ]
    ranks = [
        [f"--node_rank={rank}", f"--master_addr={launch.master}", f"--master_port={launch.port}"]
        for rank in range(launch.nodes)
    ]
    gpus = ",".join(map(str, range(launch.gpus)))
    nodes = ["--gpus", gpus, "--nnodes", str(launch.nodes), "--master_addr", launch.master]
    port = ["--master_port", str(launch.port), "--max_restarts", str(launch.max_restarts)]
    return {
        "own": [
            shlex.join(["sojourn", *train_args(launch), *nodes, *port, "--node_rank", str(rank)])
            for rank in range(launch.nodes)
        ],
        "check": f"{_ALLOW_REJOIN} {shlex.join(_torchrun(launch, rendezvous, ['doctor'], restarts=0))}",
        "every": f"{_ALLOW_REJOIN} {shlex.join(_torchrun(launch, rendezvous, train_args(launch)))}",
        "by_rank": [shlex.join(_torchrun(launch, rank, train_args(launch))) for rank in ranks],
    }


def format_shell(launch: Launch) -> str:
    """`shell_commands` as text to paste."""
    commands = shell_commands(launch)
    if "check" not in commands:
        return f"{commands['every']}\n"
    lines = [
        "# 1. check that the nodes reach each other: on every node, within ten minutes:",
        commands["check"],
        "",
        "# 2. the run: one line per node, in any order; run the same lines again to resume:",
        *commands["own"],
        "",
        "# or with torchrun: the same line on every node",
        commands["every"],
        "",
        "# or with torchrun and explicit node ranks, one line per node:",
        *commands["by_rank"],
    ]
    return "\n".join(lines) + "\n"


def slurm_script(launch: Launch) -> str:
    """A complete sbatch script.

    Slurm signals the batch shell alone (`B:`). The shell forwards the signal to the run's ranks and requeues the job
    once they have saved. A job that the user cancels is no longer RUNNING then, and stays cancelled.
    """
    lead = math.ceil(max(launch.grace, TORCHRUN_GRACE)) + _SLURM_EARLY
    train = shlex.join(["-m", "sojourn", *train_args(launch)])
    return f"""#!/bin/bash
# sbatch THIS_FILE; submitting the same job again resumes the run
#SBATCH --job-name={launch.name}
#SBATCH --nodes={launch.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={launch.gpus}
#SBATCH --cpus-per-task={4 * launch.gpus}
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@{lead}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# put sojourn and torchrun on PATH here, such as: source ~/venv/bin/activate
# tokens come from the environment (HF_TOKEN) that sbatch passes on, never from this file

master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" {_ALLOW_REJOIN}

signalled=0
save() {{
  signalled=1
  scancel --signal=TERM "$SLURM_JOB_ID"  # the job steps, not this shell: all ranks save and exit
}}
trap save TERM

srun --kill-on-bad-exit=1 torchrun \\
  --nnodes={launch.nodes} --nproc_per_node={launch.gpus} --max-restarts={launch.max_restarts} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$master:{launch.port}" \\
  {train} &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ends the wait, not the run
  wait "$run"
  code=$?
done

if [ "$signalled" = 1 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _torchrun(launch: Launch, rendezvous: list[str], command: list[str], restarts: int | None = None) -> list[str]:
    restarts = launch.max_restarts if restarts is None else restarts
    size = [f"--nnodes={launch.nodes}", f"--nproc_per_node={launch.gpus}", f"--max-restarts={restarts}"]
    return ["torchrun", *size, *rendezvous, "-m", "sojourn", *command]


def train_args(launch: Launch) -> list[str]:
    return ["train", *launch.args]
