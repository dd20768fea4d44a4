"""The exact commands that start one run on several machines: for a shell, for Slurm, for two kinds of Kubernetes job.

Nothing here starts anything. Everyone who has several machines has a launcher already, and each wants the same few
facts in other words; a mistake in one of them (a node's rank, a port, a quote) costs an hour of idle GPUs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError

HOME = "/sojourn"  # in a container: where the volume is mounted
VOLUME = "sojourn-home"
SECRET = "hf-token"  # noqa: S105  (the name of a Kubernetes secret, not what is in it)
_TORCHRUN_WAITS = 30  # seconds from a signal until torchrun kills its processes; no flag of it changes that
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
    if launch.grace > _TORCHRUN_WAITS and launch.nodes > 1:
        notes.append(
            f"torchrun ends its processes {_TORCHRUN_WAITS} s after a signal, whatever limits.grace says "
            f"({config.limits.grace})"
        )
    if config.limits.time is not None and launch.nodes > 1 and launch.max_restarts:
        notes.append(
            f"limits.time ({config.limits.time}) counts from every start, and torchrun starts a run again that has "
            "stopped at it; --max-restarts 0 makes the first stop the last"
        )
    return notes


def shell(launch: Launch) -> dict[str, Any]:
    """`check` and `every`: the same line on every machine. `by_rank`: the guides' way, a line for each."""
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
    return {
        "check": f"{_COME_BACK} {shlex.join(_torchrun(launch, meet, ['doctor'], restarts=0))}",
        "every": f"{_COME_BACK} {shlex.join(_torchrun(launch, meet, _train(launch)))}",
        "by_rank": [shlex.join(_torchrun(launch, rank, _train(launch))) for rank in ranks],
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
        "# 2. the run. The same line on every machine, in any order; the same line again continues it:",
        made["every"],
        "",
        "# the same with ranks given by hand, as guides do it; one line for each machine:",
        *made["by_rank"],
    ]
    return "\n".join(lines) + "\n"


def slurm(launch: Launch) -> str:
    """A whole sbatch script.

    Slurm tells the batch shell alone (`B:`), which passes the signal on to the run's processes and, once they have
    saved, puts the job back in the queue. A job that the user cancels is no longer RUNNING then, and stays cancelled.
    """
    lead = math.ceil(max(launch.grace, _TORCHRUN_WAITS)) + _SLURM_EARLIER
    train = shlex.join(["-m", "sojourn", *_train(launch)])
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


def pytorchjob(launch: Launch) -> str:
    """For the Kubeflow Training Operator v1, which tells torchrun by PET_… variables who is who."""
    template = {
        "spec": {
            "terminationGracePeriodSeconds": _TORCHRUN_WAITS + 15,
            "containers": [
                {
                    "name": "pytorch",  # the operator looks for this name
                    "image": _image(launch, "pytorchjob"),
                    "command": _in_container(launch),
                    "env": _environment(),
                    "resources": {"limits": {"nvidia.com/gpu": launch.gpus}},
                    "volumeMounts": _mounts(),
                }
            ],
            "volumes": _volumes(),
        }
    }
    replicas = {"Master": 1, "Worker": launch.nodes - 1}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _kubernetes_name(launch.name)},
        "spec": {
            "nprocPerNode": str(launch.gpus),
            # The operator counts every container's restarts together, and gives up when they reach this number.
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": launch.nodes * launch.max_restarts + 1},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                for kind, count in replicas.items()
                if count
            },
        },
    }
    return _needs() + _yaml(job)


def trainjob(launch: Launch) -> str:
    """For Kubeflow Trainer v2. Its runtime knows torchrun's variables; volumes are a patch to that runtime."""
    pod = {"volumes": _volumes(), "containers": [{"name": "node", "volumeMounts": _mounts()}]}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _kubernetes_name(launch.name)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": _image(launch, "trainjob"),
                "command": _in_container(launch),
                "env": _environment(),
                "numNodes": launch.nodes,
                "numProcPerNode": launch.gpus,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": launch.gpus}},
            },
            "runtimePatches": [{"manager": "sojourn", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }
    return "# Kubeflow Trainer 2.2 or newer (for runtimePatches)\n" + _needs() + _yaml(job)


def _torchrun(launch: Launch, meet: list[str], command: list[str], restarts: int | None = None) -> list[str]:
    again = launch.max_restarts if restarts is None else restarts
    size = [f"--nnodes={launch.nodes}", f"--nproc_per_node={launch.gpus}", f"--max-restarts={again}"]
    return ["torchrun", *size, *meet, "-m", "sojourn", *command]


def _train(launch: Launch) -> list[str]:
    return ["train", *launch.words]


def _image(launch: Launch, kind: str) -> str:
    if not launch.image:
        raise UserError(f"--image: {kind} needs a container image in which sojourn is installed, such as --image NAME")
    return launch.image


class _Word(str):
    """Quoted in YAML whatever it is: other readers take 1e-4 or a bare off for something else than text."""


class _Dumper(yaml.SafeDumper):
    """Repeats itself rather than writing anchors, which people do not expect in such files."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Word, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", str(word), style='"')
)


def _yaml(job: dict[str, Any]) -> str:
    made: str = yaml.dump(job, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return made


def _in_container(launch: Launch) -> list[str]:
    """No restarts inside a container: who dies takes all with it, and the containers begin again together.

    Kubernetes reads $(NAME) in a command as a variable; $$ is a plain $.
    """
    words = ["torchrun", "--max-restarts=0", "-m", "sojourn", *_train(launch)]
    return [_Word(word.replace("$", "$$")) for word in words]


def _environment() -> list[dict[str, Any]]:
    token = {"secretKeyRef": {"name": SECRET, "key": "HF_TOKEN", "optional": True}}
    return [{"name": "SOJOURN_HOME", "value": HOME}, {"name": "HF_TOKEN", "valueFrom": token}]


def _mounts() -> list[dict[str, str]]:
    return [{"name": "home", "mountPath": HOME}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108


def _volumes() -> list[dict[str, Any]]:
    return [
        {"name": "home", "persistentVolumeClaim": {"claimName": VOLUME}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _needs() -> str:
    return (
        f"# needs a PersistentVolumeClaim {VOLUME} that all nodes can mount (ReadWriteMany); it is {HOME} in the\n"
        "# containers, so files that the run names belong there. Where the hub asks for a token:\n"
        f'# kubectl create secret generic {SECRET} --from-literal=HF_TOKEN="$HF_TOKEN"\n'
    )


def _kubernetes_name(name: str) -> str:
    """Lower-case letters, digits and “-”, from a letter, with room for what the operators append."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return plain[:40].strip("-")
