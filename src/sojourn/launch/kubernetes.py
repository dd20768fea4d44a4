"""One run on several nodes as a Kubernetes job: for Kubeflow's Training Operator v1 and its Trainer v2."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sojourn.errors import UserError
from sojourn.launch.command_lines import TORCHRUN_GRACE, Launch, train_args

HOME = "/sojourn"  # in a container: where the volume is mounted
VOLUME = "sojourn-home"
SECRET = "hf-token"  # noqa: S105  (the name of a Kubernetes secret, not what is in it)


def pytorchjob(launch: Launch) -> str:
    """For the Kubeflow Training Operator v1, which configures torchrun through PET_… variables."""
    template = {
        "spec": {
            "terminationGracePeriodSeconds": TORCHRUN_GRACE + 15,
            "containers": [
                {
                    "name": "pytorch",  # the operator looks for this name
                    "image": _image(launch, "pytorchjob"),
                    "command": _container_command(launch),
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
            # The operator adds up the restarts of all containers and gives up when they reach this number.
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": launch.nodes * launch.max_restarts + 1},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                for kind, count in replicas.items()
                if count
            },
        },
    }
    return _requirements() + _yaml(job)


def trainjob(launch: Launch) -> str:
    """For Kubeflow Trainer v2. Its runtime sets torchrun's variables; volumes are a patch to the runtime."""
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
                "command": _container_command(launch),
                "env": _environment(),
                "numNodes": launch.nodes,
                "numProcPerNode": launch.gpus,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": launch.gpus}},
            },
            "runtimePatches": [{"manager": "sojourn", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }
    return "# Kubeflow Trainer 2.2 or newer (for runtimePatches)\n" + _requirements() + _yaml(job)


def _image(launch: Launch, kind: str) -> str:
    if not launch.image:
        raise UserError(f"--image: {kind} needs a container image in which sojourn is installed, such as --image NAME")
    return launch.image


class _Quoted(str):
    """Always quoted in YAML: other parsers read 1e-4 or a bare off as a number or a boolean."""


class _Dumper(yaml.SafeDumper):
    """Writes repeated parts out instead of YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')
)


def _yaml(job: dict[str, Any]) -> str:
    text: str = yaml.dump(job, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def _container_command(launch: Launch) -> list[str]:
    """No restarts inside a container: when one rank dies all containers restart together.

    Kubernetes reads $(NAME) in a command as a variable; $$ is a plain $.
    """
    args = ["torchrun", "--max-restarts=0", "-m", "sojourn", *train_args(launch)]
    return [_Quoted(arg.replace("$", "$$")) for arg in args]


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


def _requirements() -> str:
    return (
        f"# needs a PersistentVolumeClaim {VOLUME} that all nodes can mount (ReadWriteMany). It is mounted at {HOME}:\n"
        "# put the files that the run uses there. Where the hub needs a token:\n"
        f'# kubectl create secret generic {SECRET} --from-literal=HF_TOKEN="$HF_TOKEN"\n'
    )


def _kubernetes_name(name: str) -> str:
    """Lower-case letters, digits and “-”, starting with a letter, short enough for the operators' suffixes."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return plain[:40].strip("-")
