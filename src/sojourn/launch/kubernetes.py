"""One run on several machines as a job for Kubernetes: for Kubeflow's Training Operator v1, and for its Trainer v2."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sojourn.errors import UserError
from sojourn.launch.command_lines import TORCHRUN_WAITS, Launch, train_args

HOME = "/sojourn"  # in a container: where the volume is mounted
VOLUME = "sojourn-home"
SECRET = "hf-token"  # noqa: S105  (the name of a Kubernetes secret, not what is in it)


def pytorchjob(launch: Launch) -> str:
    """For the Kubeflow Training Operator v1, which tells torchrun by PET_… variables who is who."""
    template = {
        "spec": {
            "terminationGracePeriodSeconds": TORCHRUN_WAITS + 15,
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
    words = ["torchrun", "--max-restarts=0", "-m", "sojourn", *train_args(launch)]
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
