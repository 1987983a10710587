"""The CNI plugin as the CNI project's own `cnitool` 1.3.0 calls it (`make test-engines`, which builds it by Go once)."""

import json
import os
import pathlib

import pytest

import harness
from harness import cni, podman, settings
from harness.failure import need
from harness.processes import run

CNITOOL = "github.com/containernetworking/cni/cnitool@v1.3.0"
SUBNET = "10.77.0.0/24"
NETWORK = f"apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {{name: pods}}\nspec: {{cidrs: [{SUBNET}]}}\n"


class Tool:
    """cnitool, with a plugin and lists in a folder."""

    def __init__(self, plugin):
        harness.require_commands("go", "podman", "ip", "/usr/lib/cni/bridge")
        folder = pathlib.Path(os.environ.get("FREEFLOW_ENGINES", settings.TARGET / "engines")) / "cnitool-1.3.0"
        self.program, self.plugin = folder / "cnitool", plugin
        if not self.program.exists():
            run(["go", "install", CNITOOL], 600, os.environ | {"GOBIN": str(folder)})
        self.lists = plugin.directory / "net.d"
        self.state = plugin.directory / "state"
        for folder in (self.lists, self.state):
            folder.mkdir()

    def list(self, name, plugins, version="1.1.0"):
        text = json.dumps({"cniVersion": version, "name": name, "plugins": plugins})
        (self.lists / f"{name}.conflist").write_text(text)

    def call(self, command, name, pod, codes=(0,)):
        environment = {
            "PATH": os.environ["PATH"], "CNI_PATH": f"{self.plugin.directory}:{cni.PLUGINS}", "NETCONFPATH": str(self.lists),
            "FREEFLOW_RUN_DIR": str(self.plugin.host.run_dir)}
        # It keeps results in /var/lib/cni, which is a folder of the test's here.
        script = 'mount --bind "$1" /var/lib && shift && exec "$@"'
        own = ["unshare", "--mount", "sh", "-c", script, "sh", self.state]
        return run([*own, self.program, command, name, pod.path], 60, environment, codes)


@pytest.fixture(scope="module")
def place():
    with podman.on_own_host() as place:
        file = place.host.directory / "pods.yaml"
        file.write_text(NETWORK)
        place.host.freeflow("apply", "-f", file)
        yield place


@pytest.fixture(scope="module")
def tool(place):
    return Tool(cni.Plugin(place.host))


def vnics(tool):
    return [vnic["address"] for vnic in tool.plugin.host.status()["vnics"]]


# Debian's bridge speaks 1.0.0.
@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0"])
def test_a_list_with_bridge(place, tool, version):
    bridge, plugins = cni.bridge_list(tool.plugin.directory, "pods", SUBNET)
    tool.list("chained", plugins, version)
    try:
        with cni.pods(place, "") as (pod,):
            result = json.loads(tool.call("add", "chained", pod))
            address = result["ips"][0]["address"].split("/")[0]
            need(pod.addresses() == vnics(tool) == [address], f"{vnics(tool)}")
            if version != "0.3.1":
                tool.call("check", "chained", pod)
            tool.call("del", "chained", pod)
            need(vnics(tool) == [], f"left: {vnics(tool)}")
            tool.call("del", "chained", pod)
    finally:
        run(["ip", "link", "delete", bridge], codes=(0, 1))


def test_alone_with_status_and_gc(place, tool):
    tool.list("alone", [{"type": "freeflow-cni", "network": "pods"}])
    tool.list("wrong", [{"type": "freeflow-cni", "network": "pods", "netwrok": "x"}])
    with cni.pods(place, "", "") as (pod, other):
        tool.call("status", "alone", pod)
        for one in (pod, other):
            tool.call("add", "alone", one)
        need(sorted(vnics(tool)) == sorted(pod.addresses() + other.addresses()), f"{vnics(tool)}")
        tool.call("check", "alone", pod)
        output = tool.call("add", "wrong", pod, codes=(1,))
        need('netwrok="x"' in output, output)
        tool.call("gc", "alone", pod)
        need(vnics(tool) == [], f"left: {vnics(tool)}")
