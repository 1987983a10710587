"""Root of a node, by the token of the agent's pod there, changes the devices of this node, and of no other."""

import pytest

from harness import kubernetes_freeflow
from harness.failure import need
from harness.kubernetes_freeflow import NAMESPACE, slices

ACCOUNT = "freeflow-node"
OTHER = "another"
POLICY = "ValidatingAdmissionPolicy 'freeflow-node'"


@pytest.fixture(scope="module", autouse=True)
def freeflow(kubernetes):
    kubernetes_freeflow.install_once(kubernetes)


@pytest.fixture(scope="module")
def agent(kubernetes):
    """A kubeconfig file with the token that the agent's pod has."""
    selected = ["--selector", "app.kubernetes.io/component=node", "--output", "name"]
    [name] = kubernetes.kubectl("get", "pods", "--namespace", NAMESPACE, *selected).split()
    bound = ["--bound-object-kind=Pod", f"--bound-object-name={name.removeprefix('pod/')}"]
    return config(kubernetes, "agent", *bound)


@pytest.fixture(scope="module")
def unbound(kubernetes):
    """A token of the same account that names no node."""
    return config(kubernetes, "unbound")


def config(kubernetes, name, *words):
    token = kubernetes.kubectl("create", "token", ACCOUNT, "--namespace", NAMESPACE, *words).strip()
    return kubernetes.authority.kubeconfig(name, kubernetes.server, token)


def a_slice(node, name=None, driver="freeflow.io", pool=None):
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name or f"{node}-freeflow.io-9"},
            "spec": {"driver": driver, "nodeName": node, "pool": {"name": pool or node, "generation": 99, "resourceSliceCount": 1},
                     "devices": [{"name": "vnic-0"}]}}


def apply(kubernetes, given, agent, codes):
    return kubernetes.apply(given, config=agent, codes=codes, words=["--server-side", "--force-conflicts"])


def refused(kubernetes, given, agent):
    output = apply(kubernetes, given, agent, (1,))
    need(POLICY in output, output)


def test_the_nodes_own_slices_are_there(kubernetes):
    need({row["spec"]["nodeName"] for row in slices(kubernetes)} == {kubernetes.node.name}, slices(kubernetes))


@pytest.mark.parametrize("given", [
    lambda own: a_slice(OTHER),
    lambda own: a_slice(own, pool=OTHER),
    lambda own: a_slice(own, name=f"{OTHER}-freeflow.io-0"),
    lambda own: a_slice(own, driver="gpu.example.com"),
], ids=["node", "pool", "name", "driver"])
def test_an_agent_offers_nothing_of_others(kubernetes, agent, given):
    refused(kubernetes, given(kubernetes.node.name), agent)


def test_an_agent_deletes_no_slice_of_another_node(kubernetes, agent):
    foreign = a_slice(OTHER)
    kubernetes.apply(foreign)
    name = foreign["metadata"]["name"]
    output = kubernetes.kubectl("delete", "--raw", f"/apis/resource.k8s.io/v1/resourceslices/{name}", config=agent, codes=(1,))
    need(POLICY in output, output)
    refused(kubernetes, foreign | {"metadata": {"name": name, "labels": {"a": "b"}}}, agent)
    kubernetes.delete("resourceslice", name, namespace=None)


def test_a_token_without_a_node_changes_nothing(kubernetes, unbound):
    refused(kubernetes, a_slice(kubernetes.node.name), unbound)


def test_an_agent_removes_a_slice_of_its_own_node(kubernetes, agent):
    stray = a_slice(kubernetes.node.name, name="stray", pool="stray")
    kubernetes.apply(stray)
    # The agent itself may have been quicker.
    kubernetes.kubectl("delete", "--raw", "/apis/resource.k8s.io/v1/resourceslices/stray", config=agent, codes=(0, 1))
    need("stray" not in [row["metadata"]["name"] for row in slices(kubernetes)], slices(kubernetes))
