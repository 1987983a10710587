"""The Kubernetes manifests that are checked in: made of the chart, and of the shape that Kubernetes wants."""

import subprocess

import pytest
import yaml

from harness.kubernetes_freeflow import EVERYTHING, NOTHING
from harness.settings import ROOT

RENDER = ROOT / "scripts/render-manifests"


def objects(*changes):
    text = subprocess.run([RENDER, "--print", *changes], check=True, capture_output=True, text=True, timeout=60).stdout
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


def containers(pod):
    return {one["name"]: one for one in pod.get("initContainers", []) + pod["containers"]}


def test_manifests_are_what_the_chart_makes():
    subprocess.run([RENDER, "--check"], check=True, timeout=60)


@pytest.mark.parametrize("changes", [[], EVERYTHING, NOTHING], ids=["default", "everything", "nothing"])
def test_every_name_in_a_manifest_is_there(changes):
    all_of_them = objects(*changes)
    for (kind, _), one in all_of_them.items():
        if kind.endswith("RoleBinding"):
            assert (one["roleRef"]["kind"], one["roleRef"]["name"]) in all_of_them
            for subject in one["subjects"]:
                assert (subject["kind"], subject["name"]) in all_of_them
        if kind not in ("DaemonSet", "Deployment"):
            continue
        pod = one["spec"]["template"]["spec"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert ("ServiceAccount", pod["serviceAccountName"]) in all_of_them
        # A class of the chart's own would be everybody's, to push others' pods off a node.
        assert pod.get("priorityClassName", "").startswith("system-") or "priorityClassName" not in pod
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for container in containers(pod).values() for mount in container["volumeMounts"]}
        assert mounted == volumes, f"{kind}: {mounted ^ volumes}"
    assert ("Deployment", "freeflow-controller") in all_of_them or changes is NOTHING


def test_rights_are_few():
    default = objects()
    pod = default["DaemonSet", "freeflow-node"]["spec"]["template"]["spec"]
    assert "hostNetwork" not in pod
    for container in containers(pod).values():
        context = container["securityContext"]
        assert not context.get("privileged") and context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    # Only where the router is a pod's is something privileged, and that is the router alone.
    everything = objects(*EVERYTHING)
    pod = everything["DaemonSet", "freeflow-node"]["spec"]["template"]["spec"]
    assert [name for name, one in containers(pod).items() if one["securityContext"].get("privileged")] == ["router"]
    pod = everything["Deployment", "freeflow-controller"]["spec"]["template"]["spec"]
    assert "hostPID" not in pod and pod["containers"][0]["securityContext"]["runAsNonRoot"] is True
    for (kind, name), one in everything.items():
        for rule in one.get("rules", []) if kind in ("Role", "ClusterRole") else []:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], name
            assert "secrets" not in rule["resources"], name


def rules(one):
    return {(group, resource): set(rule["verbs"])
            for rule in one["rules"] for group in rule["apiGroups"] for resource in rule["resources"]}


def test_an_agent_reads_one_by_one_and_writes_slices_of_its_own_node():
    default = objects()
    granted = rules(default["ClusterRole", "freeflow-node"])
    slices = granted.pop(("resource.k8s.io", "resourceslices"))
    assert slices == {"list", "watch", "create", "patch", "delete"}
    assert set(map(frozenset, granted.values())) == {frozenset({"get"})}
    policy = default["ValidatingAdmissionPolicy", "freeflow-node"]["spec"]
    [rule] = policy["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["resources"]) == (["resource.k8s.io"], ["resourceslices"])
    assert rule["apiVersions"] == ["*"] and set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    [account] = default["ClusterRoleBinding", "freeflow-node"]["subjects"]
    [condition] = policy["matchConditions"]
    assert f'"system:serviceaccount:{account["namespace"]}:{account["name"]}"' in condition["expression"]
    binding = default["ValidatingAdmissionPolicyBinding", "freeflow-node"]["spec"]
    assert binding == {"policyName": "freeflow-node", "validationActions": ["Deny"]} and policy["failurePolicy"] == "Fail"
    assert not any(kind.startswith("Validating") for kind, _ in objects("rbac.bindAgentsToNodes=false"))


def test_an_agent_sees_of_the_kubelets_directory_its_own_part():
    """All of `plugins` has the volumes of pods in it, which a mount of it shows, and keeps from being unmounted."""
    pod = objects()["DaemonSet", "freeflow-node"]["spec"]["template"]["spec"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    kubelet = "/var/lib/kubelet"
    assert {path for path in paths.values() if path.startswith(kubelet)} == {
        f"{kubelet}/plugins/freeflow.io", f"{kubelet}/plugins_registry", f"{kubelet}/device-plugins"}
    [agent] = pod["containers"]
    assert all(mount["mountPath"] == paths[mount["name"]] for mount in agent["volumeMounts"])
    assert [mount["name"] for mount in agent["volumeMounts"] if mount.get("readOnly")] == ["run"]


def test_examples_are_objects():
    found = sorted((ROOT / "deploy/kubernetes/examples").glob("*.yaml"))
    assert found
    for path in found:
        for one in filter(None, yaml.safe_load_all(path.read_text())):
            assert one["apiVersion"] and one["kind"] and one["metadata"]["name"], path.name
