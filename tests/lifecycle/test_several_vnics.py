"""Several vNICs in one container: each is a device of its own, in its own network."""

import json
import os
import re

import pytest

import harness
from harness.failure import need
from harness.processes import run
from harness.runtime import SECONDS, Runtime, started

RED_AND_BLUE = {"freeflow.io/network": "red,blue"}
PROGRAMS = ("sh", "ls", "cat", "sleep", "chmod", "ip", "ibv_devices", "ibv_devinfo", "ibv_rc_pingpong", "rping", "ib_write_bw")


def declare(host, name, cidr):
    network = {"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": name}, "spec": {"cidrs": [cidr]}}
    file = host.directory / f"{name}.json"
    file.write_text(json.dumps(network))
    host.freeflow("apply", "-f", file)


@pytest.fixture(scope="module")
def runtime():
    with harness.Host() as host:
        declare(host, "red", "10.50.0.0/24")
        declare(host, "blue", "10.60.0.0/24")
        runtime = Runtime(host, (*PROGRAMS, harness.program("cm_ports")))
        try:
            yield runtime
        finally:
            runtime.close()


def addresses_of(runtime, name):
    """Of a container's vNICs, in the order of their devices."""
    vnics = {vnic["id"]: vnic["address"] for vnic in runtime.host.status()["vnics"]}
    ids = sorted(id for id in vnics if id == name or id.startswith(f"{name}."))
    return [vnics[id] for id in ids]


class Container:
    """One that runs in the background."""

    def __init__(self, runtime, *networks):
        self.runtime = runtime
        bundle = runtime.bundle("sleep", "600", annotations={"freeflow.io/network": ",".join(networks)})
        self.context = started(runtime, bundle)

    def __enter__(self):
        self.name, self.pid = self.context.__enter__()
        self.addresses = addresses_of(self.runtime, self.name)
        return self

    def __exit__(self, *exception):
        self.context.__exit__(*exception)

    def exec(self, *words, codes=(0,)):
        return self.runtime.call("exec", self.name, *words, codes=codes)

    def start(self, *words):
        return harness.Running(self.runtime.command("exec", self.name, *words))


def test_each_is_a_device_of_its_own(runtime):
    with Container(runtime, "red", "blue") as container:
        need(re.findall(r"freeflow\d", container.exec("ibv_devices")) == ["freeflow0", "freeflow1"], "devices")
        red, blue = container.addresses
        need(red.startswith("10.50.0.") and blue.startswith("10.60.0."), container.addresses)
        for number, address in enumerate(container.addresses):
            name = f"freeflow{number}"
            info = container.exec("ibv_devinfo", "-v", "-d", name)
            need(f"::ffff:{address}" in info and name in info, info)
            directory = f"/sys/class/infiniband/{name}"
            tail = ":".join(f"{int(part):02x}" for part in address.split("."))
            gid = container.exec("cat", f"{directory}/ports/1/gids/0").strip()
            need(gid.replace(":", "").endswith(tail.replace(":", "")), gid)
            need(container.exec("cat", f"{directory}/ports/1/gid_attrs/ndevs/0").strip() == f"ff{number}", "interface")
            need(container.exec("ls", f"{directory}/device/net").split() == [f"ff{number}"], "interface")
            need(container.exec("ls", f"{directory}/device/infiniband").split() == [name], "device")
            character = f"/sys/class/infiniband_verbs/uverbs{number}"
            need(container.exec("cat", f"{character}/ibdev").strip() == name, "ibdev")
            need(container.exec("ls", f"{character}/device/infiniband").split() == [name], "device")
            need(f"{address}/" in container.exec("ip", "-o", "address", "show", "dev", f"ff{number}"), "address")
            container.exec("sh", "-c", f"test -c /dev/infiniband/uverbs{number} && test -w /dev/infiniband/uverbs{number}")
        need(container.exec("ls", "/sys/class/infiniband").split() == ["freeflow0", "freeflow1"], "sysfs")
        # It is the host's /dev/null, whose mode a container's root must not change.
        refused = container.exec("chmod", "600", "/dev/infiniband/uverbs0", codes=(1,))
        need("Read-only" in refused and os.stat("/dev/null").st_mode & 0o777 == 0o666, refused)
        need("lo" in container.exec("ls", "/sys/class/net").split(), "other classes")
        shown = [one for one in json.loads(runtime.host.freeflow("ps", "-o", "json")) if one["engine"] == "oci"]
        need(sorted(one["network"] for one in shown) == ["blue", "red"], shown)
    need(runtime.vnics() == [], "a vNIC is still there")


def check_names(container):
    for number in range(len(container.addresses)):
        directory = f"/sys/class/infiniband/freeflow{number}"
        need(container.exec("cat", f"{directory}/uevent") == f"NAME=freeflow{number}\n", "uevent")
        need(container.exec("cat", f"{directory}/node_desc").strip().endswith(f" freeflow{number}"), "node_desc")
        need(f"uverbs{number}\n" in container.exec("cat", f"/sys/class/infiniband_verbs/uverbs{number}/uevent"), "uevent")


def test_each_is_called_by_its_number_also_after_the_router_s_death(runtime):
    with Container(runtime, "red", "blue", "red") as container:
        check_names(container)
        harness.host.kill_router(runtime.host)
        runtime.host.up()
        check_names(container)
        state = container.exec("cat", "/sys/class/infiniband/freeflow2/ports/1/state")
        need(state == "4: ACTIVE\n", state)
        refused = container.exec("sh", "-c", "echo x > /sys/class/infiniband/freeflow1/uevent", codes=(1, 2))
        need("Read-only" in refused, refused)


def test_two_in_the_same_network(runtime):
    with Container(runtime, "red", "red") as container:
        one, other = container.addresses
        need(one != other and other.startswith("10.50.0."), container.addresses)
        server = container.start("ib_write_bw", "-d", "freeflow0", "-n", "100", "-F")
        wait_for_listener(container, 18515)
        container.exec("ib_write_bw", "-d", "freeflow1", "-n", "100", "-F", "127.0.0.1")
        need(server.wait(SECONDS) == 0, server.output())


def test_the_networks_stay_apart(runtime):
    with Container(runtime, "red", "blue") as both, Container(runtime, "blue") as blue:
        for device, code in (("freeflow1", 0), ("freeflow0", 1)):
            # The ends find each other by the blue network's plain IP; the queue pair is the device's.
            server = blue.start("ibv_rc_pingpong", "-g", "0", "-n", "10")
            wait_for_listener(blue, 18515)
            output = both.exec("ibv_rc_pingpong", "-g", "0", "-n", "10", "-d", device, blue.addresses[0], codes=(code,))
            need((server.wait(SECONDS) == 0) == (code == 0), server.output())
            need(code == 0 or "Failed to modify QP to RTR" in server.output() + output, server.output() + output)


def wait_for_listener(container, port):
    wanted = f":{port:04X} "
    for _ in range(400):
        if any(wanted in line and " 0A " in line for line in container.exec("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()):
            return
    raise AssertionError("nobody listens")


def test_rdma_cm_binds_by_address(runtime):
    with Container(runtime, "red", "blue") as both, Container(runtime, "blue") as blue, Container(runtime, "red") as red:
        # A listener at the wildcard address is reached in both networks.
        for client, address in ((red, both.addresses[0]), (blue, both.addresses[1])):
            server = both.start("rping", "-s", "-a", "0.0.0.0", "-C", "5", "-v")
            ping(client, address)
            need(server.wait(SECONDS) == 0, server.output())
        # One at an address in its own alone; the client's device is that by which the kernel would send.
        for server_of, client in ((blue, both), (red, both)):
            server = server_of.start("rping", "-s", "-a", server_of.addresses[0], "-C", "5")
            ping(client, server_of.addresses[0])
            need(server.wait(SECONDS) == 0, server.output())
        server = both.start("rping", "-s", "-a", both.addresses[1], "-C", "5")
        ping(blue, both.addresses[1])
        need(server.wait(SECONDS) == 0, server.output())


def test_any_port_is_one_that_is_free_at_all_vnics(runtime):
    with Container(runtime, "red", "blue") as container:
        # Nothing before it, of the folder of a third vNIC that another container has left in the root.
        output = container.exec("cm_ports", container.addresses[1])
        need(output == "ok\n", output)


def ping(client, address):
    """Until the server listens it is refused."""
    for _ in range(100):
        output = client.exec("rping", "-c", "-a", address, "-C", "5", "-v", codes=(0, 1, 255, 234, 244, 250, 251))
        if output.count("ping data") == 5:
            return
    raise AssertionError(output)


def test_more_than_eight_are_refused(runtime):
    bundle = runtime.bundle("sleep", "600", annotations={"freeflow.io/network": ",".join(["red"] * 9)})
    need("8 vNICs" in runtime.refused(bundle), "nine vNICs")
    with Container(runtime, *["red", "blue"] * 4) as container:
        need(container.exec("ibv_devices").count("freeflow") == 8, "devices")
        need(len(container.addresses) == 8, container.addresses)
    # As an engine injects nine CDI devices, of which it knows nothing more.
    bundle = runtime.bundle("sleep", "600")
    with started(runtime, bundle):
        pass
    file = bundle / "config.json"
    spec = json.loads(file.read_text())
    for hooks in spec["hooks"].values():
        hooks.extend(hooks * 8)
    file.write_text(json.dumps(spec))
    need("8 vNICs" in runtime.refused(bundle), "nine devices")
    need(runtime.vnics() == [], "a vNIC is still there")


def test_freeflow_run(runtime):
    host = runtime.host
    script = "ibv_devices && ls /sys/class/net /dev/infiniband && ibv_devinfo -v -d freeflow1"
    output = host.freeflow("run", "--network", "red", "--network", "blue", "--", "sh", "-c", script)
    for word in ("freeflow0", "freeflow1", "ff0", "ff1", "uverbs0", "uverbs1", "::ffff:10.60.0."):
        need(word in output, f"no {word} in {output}")
    host.freeflow("run", "--name", "two", "-d", "--network", "red", "--network", "blue", "--", "sleep", "600")
    try:
        shown = [one for one in json.loads(host.freeflow("ps", "-o", "json")) if one["name"] == "two"]
        need([one["network"] for one in shown] == ["red", "blue"], shown)
        # Each by a name that describes it.
        ids = sorted(one["id"] for one in shown)
        names = [line.split("  ")[0] for line in host.freeflow("top", "--once").splitlines()[1:]]
        need(names == [f"two ({id})" for id in ids], names)
        refused = host.freeflow("describe", "vnic", "two", codes=(1, 4))
        need(all(id in refused for id in ids), refused)
        for id in ids:
            need(re.search(r"Title: +two\n", host.freeflow("describe", "vnic", id)), "not described by its id")
        need(len(runtime.vnics()) == 2, runtime.vnics())
    finally:
        host.freeflow("rm", "-f", "two")
    need(runtime.vnics() == [], "a vNIC is still there")
    nine = ["--network=red"] * 9
    need("8 vNICs" in host.freeflow("run", *nine, "--", "true", codes=(125,)), "nine vNICs")
    need("run" not in run(["ls", host.run_dir / "containers"]), "a record is left")
