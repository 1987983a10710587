"""The manifests of deploy/kubernetes before a real API server: what it takes, and what the definitions' schemas refuse."""

import pytest

from harness.failure import need
from harness.kubernetes_freeflow import CRDS, DEPLOY, documents, manifests, wait_for_crds

EXAMPLES = sorted(path.name for path in (DEPLOY / "examples").glob("*.yaml"))
# Others' definition, which is not here: its pods' templates are looked at.
FOREIGN = "MPIJob"
NETWORK = {"apiVersion": "freeflow.io/v1alpha1", "kind": "Network", "metadata": {"name": "red", "namespace": "default"}}


@pytest.fixture(scope="module", autouse=True)
def defined(kubernetes):
    kubernetes.kubectl("apply", "-f", CRDS)
    wait_for_crds(kubernetes)
    for name in ("freeflow-system", "rdma-example"):
        kubernetes.kubectl("create", "namespace", name)


def dry_run(kubernetes, path):
    return kubernetes.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", path)


@pytest.mark.parametrize("values", [[], ["router.inPod=true"], ["controller.clusterSecret=freeflow-operator", "controller.replicas=2"],
                                    ["rbac.tenantsMakeNetworks=true"]], ids=str)
def test_what_the_chart_gives(kubernetes, values):
    output = dry_run(kubernetes, manifests(kubernetes, *values))
    need("daemonset.apps/freeflow-node created" in output, output)


def test_the_plain_manifests(kubernetes):
    output = dry_run(kubernetes, DEPLOY / "freeflow.yaml")
    need("daemonset.apps/freeflow-node created" in output, output)


def parts(given):
    """What the API server knows of an object."""
    if given["kind"] != FOREIGN:
        return [given]
    where = {"namespace": given["metadata"].get("namespace", "default")}
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": where | {"name": f"{given['metadata']['name']}-{kind.lower()}"},
             "spec": replica["template"]["spec"]} for kind, replica in given["spec"]["mpiReplicaSpecs"].items()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(kubernetes, name):
    objects = [part for each in documents(DEPLOY / "examples" / name) for part in parts(each)]
    output = kubernetes.apply(*objects, words=["--dry-run=server", "--validate=strict"])
    need(len(output.strip().splitlines()) >= len(objects), output)


@pytest.mark.parametrize("spec, text", [
    ({"cidrs": ["10.50.0.0/24"], "cidr": "x"}, "unknown field"),
    ({"cidrs": "10.50.0.0/24"}, "cidrs"),
    ({"cidrs": ["10.50.0.0/24"], "access": "maybe"}, "access"),
])
def test_a_schema_refuses(kubernetes, spec, text):
    output = kubernetes.apply(NETWORK | {"spec": spec}, words=["--dry-run=server", "--validate=strict"], codes=(1,))
    need(text in output, output)
