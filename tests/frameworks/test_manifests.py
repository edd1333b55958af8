"""The manifests under deploy/ have the fields of Kubeflow's resources, and agree with the docs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML; run make frameworks")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = (ROOT / "docs" / "integrations.md").read_text()

# The fields that the manifests may use, by their names in the resources' definitions. A dict is an
# object, a list of one an array, a set the allowed values, "{}" an object with any names.
ENV = [{"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}]
RESOURCES = {"requests": "{}", "limits": "{}"}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "env": ENV,
    "resources": RESOURCES,
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "capabilities": {"drop": [str]},
    },
}
POD = {
    "spec": {
        "automountServiceAccountToken": bool,
        "securityContext": {
            "runAsNonRoot": bool,
            "runAsUser": int,
            "runAsGroup": int,
            "seccompProfile": {"type": {"RuntimeDefault", "Localhost", "Unconfined"}},
        },
        "containers": [CONTAINER],
    }
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": POD,
}
METADATA = {"name": str, "labels": "{}"}
KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": "{}"},
        "template": {
            "spec": {
                "failurePolicy": {"maxRestarts": int},
                "replicatedJobs": [
                    {
                        "name": str,
                        "template": {
                            "metadata": {"labels": "{}"},
                            "spec": {"backoffLimit": int, "template": POD},
                        },
                    }
                ],
            }
        },
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"kind": {"TrainingRuntime", "ClusterTrainingRuntime"}, "name": str},
        "trainer": {
            "numNodes": int,
            "numProcPerNode": int,
            "command": [str],
            "env": ENV,
            "resourcesPerNode": RESOURCES,
        },
    },
}


def wrong(value: Any, schema: Any, where: str) -> Iterator[str]:
    """What does not fit the schema."""
    if schema == "{}":
        schema = dict.fromkeys(value, (str, int)) if isinstance(value, dict) else dict
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{where} is no object"
            return
        for name, inner in value.items():
            if name in schema:
                yield from wrong(inner, schema[name], f"{where}.{name}")
            else:
                yield f"{where} has no field {name}"
    elif isinstance(schema, list):
        for index, inner in enumerate(value if isinstance(value, list) else [None]):
            yield from wrong(inner, schema[0], f"{where}[{index}]")
    elif isinstance(schema, set):
        if value not in schema:
            yield f"{where} is {value!r}"
    elif not isinstance(value, schema) or (isinstance(value, bool) and schema is not bool):
        yield f"{where} is a {type(value).__name__}"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


PYTORCHJOB = documents("pytorchjob.yaml")[0]
RUNTIME, TRAINJOB = documents("trainjob.yaml")
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


@pytest.mark.parametrize("manifest", [PYTORCHJOB, RUNTIME, TRAINJOB], ids=lambda m: str(m["kind"]))
def test_fields_are_those_of_the_resource(manifest: dict[str, Any]) -> None:
    spec = KINDS[manifest["apiVersion"], manifest["kind"]]
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert not list(wrong(manifest["metadata"], METADATA, "metadata"))
    assert not list(wrong(manifest["spec"], spec, "spec"))


def test_a_field_that_does_not_exist_would_be_found() -> None:
    spec = KINDS["kubeflow.org/v1", "PyTorchJob"]
    assert list(wrong({"nprocPerNode": 4}, spec, "spec")) == ["spec.nprocPerNode is a int"]
    assert list(wrong({"replicas": 1}, spec, "spec")) == ["spec has no field replicas"]


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
