"""The chart by Helm itself: it makes of it what scripts/render-manifests makes, and it installs, upgrades and removes it."""

import json

import pytest
import yaml

from harness import kubernetes_freeflow, settings
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes import installed
from harness.kubernetes_freeflow import DEPLOY, EVERYTHING, NAMESPACE, NOTHING, import_image, slices
from harness.kubernetes_pods import SLEEP, ByClaim, vnics, wait_for_no_vnic
from harness.processes import run

CHART = DEPLOY / "chart"


def values_file(path, given):
    """Values as render-manifests takes them, in a file as Helm takes them."""
    values = {}
    for each in given:
        name, _, text = each.partition("=")
        *parts, last = name.split(".")
        at = values
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = yaml.safe_load(text)
    path.write_text(json.dumps(values))
    return path


def by_name(text):
    rows = [one for one in yaml.safe_load_all(text) if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in rows}
    need(len(found) == len(rows), "an object comes twice")
    return found


@pytest.mark.parametrize("given", [[], EVERYTHING, NOTHING], ids=["default", "everything", "nothing"])
def test_helm_makes_what_render_manifests_makes(given, tmp_path):
    file = values_file(tmp_path / "values.json", given)
    helm = by_name(run([installed() / "helm" / "helm", "template", "freeflow", CHART, "--namespace", NAMESPACE, "--include-crds",
                        "--values", file], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}))
    ours = by_name(run(["/usr/bin/python3", settings.ROOT / "scripts" / "render-manifests", "--print", *given]))
    # Helm makes it by --create-namespace.
    del ours["Namespace", NAMESPACE]
    need(helm.keys() == ours.keys(), f"{helm.keys() ^ ours.keys()}")
    for name, one in ours.items():
        need(helm[name] == one, f"{name}:\n{yaml.safe_dump(helm[name])}\n--- render-manifests:\n{yaml.safe_dump(one)}")


def test_the_chart_has_no_faults_for_helm(tmp_path):
    output = run([installed() / "helm" / "helm", "lint", "--strict", CHART], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    need("0 chart(s) failed" in output, output)


def helm(kubernetes, *words):
    return kubernetes.machine.call("helm", "--kubeconfig", kubernetes.admin, "--namespace", NAMESPACE, *words, seconds=240)


def test_installed_upgraded_and_removed(kubernetes):
    import_image(kubernetes.node)
    kubernetes.node.host.status()
    repository, tag = kubernetes_freeflow.IMAGE
    given = [f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never", f"node.command={settings.DIST}/bin/freeflow"]
    first = values_file(kubernetes.directory / "first.json", given)
    helm(kubernetes, "install", "freeflow", CHART, "--create-namespace", "--values", first, "--wait", "--timeout", "3m")
    kubernetes_freeflow.wait_until_ready(kubernetes)
    way = ByClaim(kubernetes)
    way.prepare_networks()
    kubernetes.apply(*way.objects("one", SLEEP, "red"))
    kubernetes.wait_for_ready("one")
    before = vnics(kubernetes)
    need([row["network"] for row in before] == ["k8s.default.red"], before)

    second = values_file(kubernetes.directory / "second.json", [*given, "node.options=[--vnics, '5']"])
    helm(kubernetes, "upgrade", "freeflow", CHART, "--values", second, "--wait", "--timeout", "3m")
    wait_until(lambda: [len(row["spec"]["devices"]) for row in slices(kubernetes)] == [5], "the new agent offers 5 vNICs")
    need(vnics(kubernetes) == before and "PORT_ACTIVE" in kubernetes.exec("one", "ibv_devinfo"), vnics(kubernetes))
    kubernetes.delete("pod", "one")
    wait_for_no_vnic(kubernetes)
    way.remove()

    helm(kubernetes, "uninstall", "freeflow", "--wait")
    def left():
        return [row["metadata"]["name"] for kind in ("daemonset", "deployment", "pod") for row in kubernetes.get(kind, namespace=NAMESPACE)]
    wait_until(lambda: not left(), lambda: f"nothing is left: {left()}")
    # Helm removes no definitions, and with them nobody's objects.
    need("networks.freeflow.io" in kubernetes.kubectl("get", "crd"), "the definitions are gone")
