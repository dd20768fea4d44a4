"""The exact commands that start one run on several machines, for a shell and for Slurm.

Nothing here starts anything. Everyone who has several machines has a launcher already, and each wants the same few
facts in other words; a mistake in one of them (a node's rank, a port, a quote) costs an hour of idle GPUs. Jobs for
Kubernetes are in `launch_kubernetes.py`.
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

TORCHRUN_WAITS = 30  # seconds from a signal until torchrun kills its processes; no flag of it changes that
_SLURM_EARLIER = 60  # Slurm may send a signal this much too early, and looks at the time once a minute
# Without it a machine that comes back is never told where the others meet: torchrun says so in the first round only.
_COME_BACK = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\]")
_SECRETS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|://[^/\s@]*:[^/\s@]+@|\b(api_?key|password|secret|\w*_token)=.", re.I)


@dataclass(frozen=True)
class Launch:
    """One run on `nodes` machines of `gpus` processes each; `words` are what follows `sojourn train`."""

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus: int
    master: str | None = None
    port: int = 29500
    max_restarts: int = 3
    image: str | None = None
    grace: float = 30.0


def refuse_secrets(words: Sequence[str]) -> None:
    """Before anything reads the words: an error about them would show them, as would every list of processes."""
    if any(_SECRETS.search(word) for word in words):
        raise UserError(
            "command line: one of the words looks like a secret, which is never put in a command; "
            "set it in the environment of every machine instead, such as HF_TOKEN"
        )


def check(launch: Launch, config: RunConfig) -> list[str]:
    """Refuses what could not run; returns what is worth knowing before it does."""
    batch, size = config.train.global_batch, launch.nodes * launch.gpus
    if batch < size:
        raise UserError(
            f"train.global_batch: {batch} rows cannot be shared by {size} processes ({launch.nodes} × {launch.gpus}); "
            f"set train.global_batch={size}"
        )
    if launch.nodes > 1 and isinstance(config.parallel.gpus, list):
        raise UserError(
            "parallel.gpus: with several machines each process gets a GPU of its own; remove it and say how many "
            f"each machine has: --gpus-per-node {len(config.parallel.gpus)}"
        )
    if launch.master is not None and not _HOST.fullmatch(launch.master):
        raise UserError("--master: a host name or an address is wanted, without a port, such as --master 192.168.1.1")
    notes = []
    if launch.grace > TORCHRUN_WAITS and launch.nodes > 1:
        notes.append(
            f"torchrun ends its processes {TORCHRUN_WAITS} s after a signal, whatever limits.grace says "
            f"({config.limits.grace})"
        )
    return notes


def shell(launch: Launch) -> dict[str, Any]:
    """`own`: our command, a line for each machine. With torchrun by hand: `check` and `every`, the same line on every
    machine; `by_rank`, the guides' way, a line for each."""
    if launch.nodes == 1:
        return {"every": shlex.join(["sojourn", "train", *launch.words])}
    if launch.master is None:
        raise UserError(
            "--master: say which of the machines the others find, by an address that all of them reach, such as "
            "--master 192.168.1.1"
        )
    meet = [
        "--rdzv-backend=c10d",
        f"--rdzv-id={launch.name}",
        f"--rdzv-endpoint={launch.master}:{launch.port}",
    ]
    ranks = [
        [f"--node_rank={rank}", f"--master_addr={launch.master}", f"--master_port={launch.port}"]
        for rank in range(launch.nodes)
    ]
    gpus = ",".join(map(str, range(launch.gpus)))
    spread = ["--gpus", gpus, "--nnodes", str(launch.nodes), "--master_addr", launch.master]
    place = ["--master_port", str(launch.port), "--max_restarts", str(launch.max_restarts)]
    return {
        "own": [
            shlex.join(["sojourn", *train_args(launch), *spread, *place, "--node_rank", str(rank)])
            for rank in range(launch.nodes)
        ],
        "check": f"{_COME_BACK} {shlex.join(_torchrun(launch, meet, ['doctor'], restarts=0))}",
        "every": f"{_COME_BACK} {shlex.join(_torchrun(launch, meet, train_args(launch)))}",
        "by_rank": [shlex.join(_torchrun(launch, rank, train_args(launch))) for rank in ranks],
    }


def shell_text(launch: Launch) -> str:
    """What `shell` made, ready to be pasted."""
    made = shell(launch)
    if "check" not in made:
        return f"{made['every']}\n"
    lines = [
        "# 1. do the machines find each other? On every machine, within ten minutes:",
        made["check"],
        "",
        "# 2. the run. One line for each machine, in any order; the same lines again continue it:",
        *made["own"],
        "",
        "# or by torchrun: the same line on every machine",
        made["every"],
        "",
        "# or by torchrun with ranks given by hand, as guides do it; one line for each machine:",
        *made["by_rank"],
    ]
    return "\n".join(lines) + "\n"


def slurm(launch: Launch) -> str:
    """A whole sbatch script.

    Slurm tells the batch shell alone (`B:`), which passes the signal on to the run's processes and, once they have
    saved, puts the job back in the queue. A job that the user cancels is no longer RUNNING then, and stays cancelled.
    """
    lead = math.ceil(max(launch.grace, TORCHRUN_WAITS)) + _SLURM_EARLIER
    train = shlex.join(["-m", "sojourn", *train_args(launch)])
    return f"""#!/bin/bash
# sbatch THIS_FILE; another start of the same job continues the run
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

# what makes sojourn and torchrun known on the nodes, such as: source ~/venv/bin/activate
# tokens come from the environment (HF_TOKEN) that sbatch hands on, never from this file

master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" {_COME_BACK}

told=0
save() {{
  told=1
  scancel --signal=TERM "$SLURM_JOB_ID"  # the steps, not this shell: all processes save and leave
}}
trap save TERM

srun --kill-on-bad-exit=1 torchrun \\
  --nnodes={launch.nodes} --nproc_per_node={launch.gpus} --max-restarts={launch.max_restarts} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$master:{launch.port}" \\
  {train} &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ends a wait, not the run
  wait "$run"
  code=$?
done

if [ "$told" = 1 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _torchrun(launch: Launch, meet: list[str], command: list[str], restarts: int | None = None) -> list[str]:
    again = launch.max_restarts if restarts is None else restarts
    size = [f"--nnodes={launch.nodes}", f"--nproc_per_node={launch.gpus}", f"--max-restarts={again}"]
    return ["torchrun", *size, *meet, "-m", "sojourn", *command]


def train_args(launch: Launch) -> list[str]:
    return ["train", *launch.words]
