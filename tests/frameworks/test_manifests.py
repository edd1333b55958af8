"""The manifests under deploy/ fit Kubeflow's own models, and agree with the docs."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubeflow.training", reason="needs Kubeflow; run make frameworks")

import yaml
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api import models as trainer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = (ROOT / "docs" / "integrations.md").read_text()

# By apiVersion and kind, the official model.
MODELS = {
    ("kubeflow.org/v1", "PyTorchJob"): "KubeflowOrgV1PyTorchJob",  # of kubeflow-training
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): trainer.TrainerV1alpha1TrainingRuntime,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): trainer.TrainerV1alpha1TrainJob,
}


def validate(manifest: dict[str, Any]) -> None:
    """Raises ValueError if a field does not exist, is missing, or has a value of a wrong type."""
    model = MODELS[manifest["apiVersion"], manifest["kind"]]
    if isinstance(model, str):
        require_round_trip(manifest, model)
    else:
        validate_strictly(model, manifest)


def validate_strictly(model: Any, value: dict[str, Any]) -> None:
    """Kubeflow Trainer's models ignore fields that do not exist, unless they are told not to."""
    model.model_validate(with_quantities(value), extra="forbid", by_alias=True, by_name=False)


def with_quantities(value: Any) -> Any:
    """Quantities are numbers or strings, which their model takes from JSON only."""
    if isinstance(value, list):
        return [with_quantities(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: {
            k: trainer.IoK8sApimachineryPkgApiResourceQuantity.from_json(json.dumps(v))
            for k, v in inner.items()
        }
        if name in ("requests", "limits")
        else with_quantities(inner)
        for name, inner in value.items()
    }


def require_round_trip(manifest: dict[str, Any], model: str) -> None:
    """Kubeflow Training's models check no types: they convert, and drop fields that do not exist.

    So what they write is what they have read only if they know every field and its type.
    """
    given = json.dumps(manifest, sort_keys=True)
    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=given), model)
    written = json.dumps(client.sanitize_for_serialization(read), sort_keys=True)
    if written != given:
        raise ValueError(f"{model} has read {given} as {written}")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


PYTORCHJOB = documents("pytorchjob.yaml")[0]
RUNTIME, TRAINJOB = documents("trainjob.yaml")
MANIFESTS = {manifest["kind"]: manifest for manifest in (PYTORCHJOB, RUNTIME, TRAINJOB)}
# Where these are.
MASTER = ("spec", "pytorchReplicaSpecs", "Master")
JOB = ("spec", "template", "spec", "replicatedJobs", 0)
CONTAINER = ("template", "spec", "containers", 0)
REPLICA_SPECS = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]
NODE = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]
TRAINER = TRAINJOB["spec"]["trainer"]
PODS = {
    "Master": REPLICA_SPECS["Master"]["template"]["spec"],
    "Worker": REPLICA_SPECS["Worker"]["template"]["spec"],
    "node": NODE["template"]["spec"]["template"]["spec"],
}


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable for variable in container["env"]}


def test_every_manifest_is_checked_here() -> None:
    assert sorted(path.name for path in DEPLOY.glob("*.yaml")) == [
        "pytorchjob.yaml",
        "trainjob.yaml",
    ]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=MANIFESTS)
def test_fields_are_those_of_the_resource(manifest: str) -> None:
    validate(MANIFESTS[manifest])


@pytest.mark.parametrize("pod", PODS)
def test_pods_are_those_of_kubernetes(pod: str) -> None:
    validate_strictly(trainer.IoK8sApiCoreV1PodSpec, PODS[pod])


# Where in a manifest something is, and a wrong value of it.
WRONG: list[tuple[str, tuple[Any, ...], Any]] = [
    ("PyTorchJob", ("spec", "nprocPerNode"), 4),
    ("PyTorchJob", ("spec", "nprocPerNodes"), "4"),
    ("PyTorchJob", ("spec", "runPolicy", "backoffLimit"), "3"),
    ("PyTorchJob", (*MASTER, "restartpolicy"), "Never"),
    ("PyTorchJob", (*MASTER, *CONTAINER, "image"), 3),
    ("PyTorchJob", (*MASTER, *CONTAINER, "securityContext", "capabilities", "drop"), "ALL"),
    ("TrainingRuntime", ("spec", "mlPolicy", "numNodes"), "1"),
    ("TrainingRuntime", ("spec", "mlpolicy"), {}),
    ("TrainingRuntime", (*JOB, "template", "spec", "backofflimit"), 0),
    ("TrainingRuntime", (*JOB, "template", "spec", *CONTAINER, "image"), 3),
    ("TrainJob", ("metadata", "labels"), ["torch"]),
    ("TrainJob", ("spec", "runtimeRef", "nam"), "slipstream"),
    ("TrainJob", ("spec", "trainer", "numProcPerNode"), "4"),
    ("TrainJob", ("spec", "trainer", "resourcesPerNode", "requests", "cpu"), [4]),
]


@pytest.mark.parametrize(("manifest", "place", "value"), WRONG)
def test_a_misspelt_field_and_a_wrong_type_are_refused(
    manifest: str, place: tuple[Any, ...], value: Any
) -> None:
    changed = deepcopy(MANIFESTS[manifest])
    *path, last = place
    inner = changed
    for name in path:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(ValueError, match=r"has read|validation error|No match found"):
        validate(changed)


def test_values_that_the_models_do_not_check() -> None:
    assert PYTORCHJOB["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    for spec in REPLICA_SPECS.values():
        assert spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")


@pytest.mark.parametrize("pod", PODS)
def test_the_secret_is_a_reference(pod: str) -> None:
    (container,) = PODS[pod]["containers"]
    secret = env_of(container)["SLIPSTREAM_SECRET"]
    wanted = {"secretKeyRef": {"name": "slipstream-secret", "key": "secret"}}
    assert secret == {"name": "SLIPSTREAM_SECRET", "valueFrom": wanted}


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml"])
def test_the_commands_of_a_manifest_are_in_the_docs(name: str) -> None:
    lines = [line.strip("# ") for line in (DEPLOY / name).read_text().splitlines()]
    commands = [line for line in lines if line.startswith(("kubectl", "openssl"))]
    assert len(commands) == 2
    assert all(command in DOCS for command in commands)
    # By a pipe: other users of the host see the arguments of commands.
    assert commands[0].endswith(
        "create secret generic slipstream-secret --from-file=secret=/dev/stdin"
    )
    assert name in commands[1]


@pytest.mark.parametrize("pod", PODS)
def test_pods_are_not_root(pod: str) -> None:
    security = PODS[pod]["securityContext"]
    assert security["runAsNonRoot"]
    user = f"USER {security['runAsUser']}:{security['runAsGroup']}"
    assert user in (DEPLOY / "Dockerfile").read_text().splitlines()
    for container in PODS[pod]["containers"]:
        assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_commands_are_those_of_the_docs_and_of_the_image() -> None:
    master, worker = (PODS[kind]["containers"][0]["command"] for kind in ("Master", "Worker"))
    assert master == worker == TRAINER["command"] == ["torchrun", "train.py"]
    assert "`torchrun train.py`" in DOCS
    assert 'CMD ["torchrun", "train.py"]' in (DEPLOY / "Dockerfile").read_text()


def test_operators_find_their_containers() -> None:
    assert PODS["Master"]["containers"][0]["name"] == "pytorch"
    assert PODS["node"]["containers"][0]["name"] == NODE["name"] == "node"
    labels = NODE["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    wanted = {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    assert TRAINJOB["spec"]["runtimeRef"] == wanted


def test_pods_and_processes_agree() -> None:
    assert REPLICA_SPECS["Master"]["replicas"] == 1
    pods = sum(spec["replicas"] for spec in REPLICA_SPECS.values())
    processes = int(PYTORCHJOB["spec"]["nprocPerNode"])
    assert (pods, processes) == (TRAINER["numNodes"], TRAINER["numProcPerNode"])
    for holder, resources in [
        *((PODS[kind]["containers"][0], "resources") for kind in ("Master", "Worker")),
        (TRAINER, "resourcesPerNode"),
    ]:
        threads = int(env_of(holder)["OMP_NUM_THREADS"]["value"])
        assert int(holder[resources]["requests"]["cpu"]) == threads * processes
        assert holder[resources]["requests"]["memory"] == holder[resources]["limits"]["memory"]
