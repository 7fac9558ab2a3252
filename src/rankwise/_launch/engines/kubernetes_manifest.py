"""Manifests for Kubernetes: a headless service, and an Indexed Job or a JobSet whose pods are the nodes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from rankwise._launch.engines.slurm_time import minutes_of
from rankwise.errors import InvalidArgumentError

# Where the ranks meet, on the first pod.
_PORT: Final = 29500
# The longest name of a pod's host, of which the job adds "-INDEX" to its own.
_LONGEST_NAME: Final = 55

# A manifest, or a part of one.
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What to run as a job of Kubernetes: a pod for each node.

    A pod with one rank runs the command itself, and is a rank by its completion index, which Kubernetes sets, and by
    WORLD_SIZE and MASTER_ADDR, which the manifest sets. A pod with several runs `rankwise launch`, with the index as
    the rank of its node. The first failure of a pod ends the job, and each restart starts all pods again.

    Attributes:
        name: The name of the job.
        image: The container image.
        command: The program and its arguments.
        nnodes: The number of pods.
        nproc: The number of ranks in each pod.
        gpus: The number of GPUs of each rank.
        cpus: The number of CPUs of each rank; 0 for no request.
        memory: The memory of each pod, such as "32Gi"; "" for no request.
        time: The limit of the job's time, as for sbatch; "" for none.
        restarts: How often a JobSet starts all pods again after a failure; an Indexed Job cannot.

    Raises:
        InvalidArgumentError: Kubernetes does not accept such a name, or a value is out of range.
    """

    name: str
    image: str
    command: tuple[str, ...]
    nnodes: int = 1
    nproc: int = 1
    gpus: int = 0
    cpus: int = 0
    memory: str = ""
    time: str = ""
    restarts: int = 0

    def __post_init__(self) -> None:
        name = re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
            raise InvalidArgumentError(
                f"{self.name!r} is not a name for a job of Kubernetes: a letter, and letters, digits and dashes, "
                f"{_LONGEST_NAME} at most; give it with --name"
            )
        object.__setattr__(self, "name", name)
        minutes_of(self.time)

    def objects(self, kind: Literal["job", "jobset"]) -> list[Fields]:
        """Return the objects of the manifest: a service and an Indexed Job, or a JobSet, which makes its service.

        Raises:
            InvalidArgumentError: An Indexed Job cannot restart all of its pods.
        """
        if kind == "jobset":
            return [self._jobset()]
        if self.restarts:
            raise InvalidArgumentError(
                f"--requeue {self.restarts} needs --kind jobset: a Job starts the pod that has failed again, alone, "
                "and the other ranks have lost it"
            )
        return [self._service(), self._job(f"{self.name}-0.{self.name}") | {"metadata": {"name": self.name}}]

    def text(self, kind: Literal["job", "jobset"]) -> str:
        """Return the manifest as YAML, for `kubectl apply -f -`: its objects are written as JSON, which is YAML too.

        Raises:
            InvalidArgumentError: As `objects`.
        """
        return "".join(f"---\n{json.dumps(each, indent=2)}\n" for each in self.objects(kind))

    def _service(self) -> Fields:
        """Return a headless service: it gives each pod of the job the name JOB-INDEX.SERVICE."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
                "ports": [{"name": "rendezvous", "port": _PORT}],
            },
        }

    def _jobset(self) -> Fields:
        template = self._job(f"{self.name}-node-0-0.{self.name}")
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.restarts},
                "successPolicy": {"operator": "All"},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": template["spec"]}}],
            },
        }

    def _job(self, first_host: str) -> Fields:
        minutes = minutes_of(self.time)
        spec: Fields = {
            "completionMode": "Indexed",
            "completions": self.nnodes,
            "parallelism": self.nnodes,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "ranks", "operator": "NotIn", "values": [0]},
                    },
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"spec": self._pod(first_host)},
        }
        if minutes is not None:
            spec["activeDeadlineSeconds"] = minutes * 60
        return {"apiVersion": "batch/v1", "kind": "Job", "spec": spec}

    def _pod(self, first_host: str) -> Fields:
        container: Fields = {
            "name": "ranks",
            "image": self.image,
            "command": self._command(first_host),
            "env": self._variables(first_host),
            "ports": [{"containerPort": _PORT}],
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108 - of the container
        }
        if amounts := self._amounts():
            container["resources"] = {"requests": amounts, "limits": amounts}
        return {
            "restartPolicy": "Never",
            "subdomain": self.name,
            "containers": [container],
            # By default a pod has 64 MB of it, and ranks of one host exchange tensors there.
            "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
        }

    def _command(self, first_host: str) -> list[str]:
        if self.nproc == 1:
            return list(self.command)
        target = self.command[1:] if self.command[0] == "python" else ("--no-python", *self.command)
        hosts = [f"--nnodes={self.nnodes}", "--node-rank=$(NODE_RANK)", f"--master-addr={first_host}"]
        return ["rankwise", "launch", f"--nproc={self.nproc}", *(hosts if self.nnodes > 1 else []), *target]

    def _variables(self, first_host: str) -> list[Fields]:
        if self.nproc == 1:
            values = {"WORLD_SIZE": str(self.nnodes), "MASTER_ADDR": first_host, "MASTER_PORT": str(_PORT)}
            return [{"name": name, "value": value} for name, value in values.items()]
        # Kubernetes sets JOB_COMPLETION_INDEX too, but the command can refer to variables of this list alone.
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        return [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}]

    def _amounts(self) -> dict[str, str]:
        amounts = {"cpu": str(self.cpus * self.nproc) if self.cpus else "", "memory": self.memory}
        amounts["nvidia.com/gpu"] = str(self.gpus * self.nproc) if self.gpus else ""
        return {name: amount for name, amount in amounts.items() if amount}
