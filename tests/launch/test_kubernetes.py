"""The manifests of `rankwise submit --k8s`, by the published schemas; and the pods that they describe."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from rankwise._environment.detect import detect
from rankwise._launch.engines.kubernetes_manifest import Manifest
from rankwise.errors import InvalidArgumentError

VERSION = "1.30"


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "name": "train",
        "image": "registry/train:1",
        "command": ("python", "train.py"),
        "nnodes": 2,
    }
    return Manifest(**(values | changes))


@pytest.mark.parametrize("changes", [{}, {"nproc": 4, "gpus": 1, "cpus": 2, "memory": "32Gi", "time": "1:00:00"}])
def test_a_job_fits_the_published_schema(changes: dict[str, Any]) -> None:
    for each in manifest(**changes).objects("job"):
        kubernetes_validate.validate(each, VERSION, strict=True)


def test_the_schema_finds_errors() -> None:
    _, job = manifest().objects("job")
    job["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_the_job_in_a_jobset_fits_the_published_schema() -> None:
    """No package has the schema of JobSet itself."""
    (jobset,) = manifest(nproc=2, restarts=3).objects("jobset")
    replicated = jobset["spec"]["replicatedJobs"][0]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train-node-0"}, **replicated["template"]}
    kubernetes_validate.validate(job, VERSION, strict=True)
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_pod_is_read_as_a_rank(kind: Any) -> None:
    *_, last = manifest().objects(kind)
    spec = last["spec"] if kind == "job" else last["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    environ = {each["name"]: each["value"] for each in container["env"]} | {
        "JOB_COMPLETION_INDEX": "1",  # Kubernetes sets it
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    }
    found = detect(environ)
    host = "train-0.train" if kind == "job" else "train-node-0-0.train"
    assert (found.launcher, found.rank.value, found.world_size.value) == ("kubernetes", 1, 2)
    assert found.host is not None
    assert found.host.value == host


def test_what_kubernetes_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--kind jobset"):
        manifest(restarts=1).objects("job")
    with pytest.raises(InvalidArgumentError, match="not a name"):
        manifest(name="1")
    assert manifest(name="My_Script").name == "my-script"
