"""Declared control by the command: objects, refusals, watching; networks of containers end to end, and kept apart.

The document's examples are tests/control/test_control_docs.py; what rules, rates and quotas do to traffic has its own tests.
"""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

import harness
from harness import Host, Lab, Running, need
from harness.settings import PROGRAMS

RED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red, labels: {colour: warm}}
spec: {tenant: red, cidrs: [10.50.0.0/24]}
"""
BLUE = RED.replace("red", "blue").replace("warm", "cold")
PEER_SECONDS = 20
INSIDE = [sys.executable, str(PROGRAMS / "lab_inside.py")]

# Sends one UDP datagram in a frame of its own making: to which MAC and IP address, from which.
FRAME = """
import socket, struct, sys
interface, mac, source, target, port, text = sys.argv[1:]
payload = text.encode()
udp = struct.pack("!HHHH", 5000, int(port), 8 + len(payload), 0) + payload
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xffff: total = (total & 0xffff) + (total >> 16)
    return 0xffff - total
header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(target))
header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind((interface, 0))
own = raw.getsockname()[4]
for _ in range(20):
    raw.send(bytes.fromhex(mac.replace(":", "")) + own + b"\\x08\\x00" + header + udp)
"""


def apply(host, text, *options, codes=(0,)):
    path = host.directory / "objects.yaml"
    path.write_text(text)
    return host.freeflow("apply", "-f", path, *options, codes=codes)


def get(host, *words):
    return json.loads(host.freeflow("get", *words, "-o", "json"))


def names(host, *words):
    return sorted(item["metadata"]["name"] for item in get(host, *words)["items"])


# ---- objects


def life_of_an_object(host):
    need(apply(host, RED, "--dry-run").strip() == "network/red created (dry run)", "not a dry run")
    need(names(host, "networks") == ["default"], "the dry run changed something")
    need(apply(host, RED + "---" + BLUE).split() == ["network/red", "created", "network/blue", "created"], "not created")
    need("unchanged" in apply(host, RED), "the same again is a change")
    need(names(host, "net", "-l", "colour=cold") == ["blue"], "labels don't choose")
    red = get(host, "network", "red")
    need(red["spec"]["access"] == "allow" and red["metadata"]["generation"] == 1, f"defaults are not written back: {red}")
    need("red" in host.freeflow("get", "networks", "-o", "wide"), "no table")
    changed = RED.replace("tenant: red", "tenant: red, access: deny")
    host.directory.joinpath("changed.yaml").write_text(changed)
    need("+  access: deny" in host.freeflow("diff", "-f", host.directory / "changed.yaml", codes=(1,)), "diff shows no change")
    need("configured" in apply(host, changed), "not changed")
    need(not host.freeflow("diff", "-f", host.directory / "changed.yaml").strip(), "diff shows what is so")
    need(get(host, "network", "red")["metadata"]["generation"] == 2, "no new generation")
    saved = host.freeflow("get", "networks", "-o", "yaml")
    need(apply(host, saved).count("unchanged") == 3, "what is printed is not what can be applied")
    path = host.directory / "saved.yaml"
    path.write_text(host.freeflow("get", "network", "red", "-o", "yaml"))
    apply(host, RED)
    output = host.freeflow("delete", "-f", path, codes=(3,))
    need("resourceVersion" in output and "red" in names(host, "networks"), f"another's work is lost: {output}")
    path.write_text(host.freeflow("get", "network", "red", "-o", "yaml"))
    need("deleted" in host.freeflow("delete", "-f", path), "not deleted")
    need("deleted" in host.freeflow("delete", "network", "blue"), "not deleted")
    host.freeflow("get", "network", "red", codes=(4,))
    host.freeflow("delete", "network", "red", codes=(4,))
    host.freeflow("delete", "network", "red", "--ignore-not-found")


def several_deleted(host):
    """A dry run reports what the real one does; where something else uses one, nothing goes."""
    both = RED + "---\napiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: v}\nspec: {network: red}\n"
    apply(host, both)
    path = host.directory / "objects.yaml"
    reported = host.freeflow("delete", "-f", path, "--dry-run")
    need(reported.splitlines() == ["vnic/v deleted (dry run)", "network/red deleted (dry run)"], reported)
    apply(host, both.replace("name: v", "name: other"))
    path.write_text(both)
    for options in ([], ["--dry-run"]):
        output = host.freeflow("delete", "-f", path, *options, codes=(3,))
        need("used by Vnic other" in output, output)
    need(names(host, "vnics") == ["other", "v"], "something was deleted")
    host.freeflow("delete", "vnic", "other")
    need(host.freeflow("delete", "-f", path).split() == ["vnic/v", "deleted", "network/red", "deleted"], "not deleted")


def refusals(host):
    for text, part in [
        (RED.replace("10.50.0.0/24", "x"), "(line 5): spec.cidrs[0]: "),
        (RED.replace("cidrs", "cirds"), "cirds"),
        (RED + "---" + BLUE.replace("tenant: blue", "tenant: blue, qosClass: none"), "document 2"),
        (RED.replace("v1", "v9"), "apiVersion"),
    ]:
        output = apply(host, text, codes=(3,))
        need(part in output and "nothing was changed" in output, f"{part!r} is not in: {output}")
    need(names(host, "networks") == ["default"], "a refused file changed something")
    output = host.freeflow("delete", "network", "default", codes=(3,))
    need("built in" in output and "roles" not in output, output)
    # Neither file nor server is hurt by what is too much.
    apply(host, "a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [" + "*b, " * 100_000 + "]\n", codes=(3,))
    apply(host, "[" * 100_000, codes=(3,))


def watched(host):
    watch = Running(host.command("get", "networks", "-w"))
    try:
        watch.wait_for_output("default")
        apply(host, RED)
        watch.wait_for_output("red")
        host.freeflow("delete", "network", "red")
        output = watch.wait_for_output("DELETED")
        need([line.split()[:2] for line in output.splitlines() if "red" in line][0] == ["ADDED", "red"], output)
    finally:
        watch.kill()


def router_killed(host):
    """An answered change is there after kill -9; the watch ends and says so."""
    apply(host, RED + "---" + BLUE)
    watch = Running(host.command("get", "networks", "-w"))
    watch.wait_for_output("red")
    subprocess.run(["kill", "-9", str(host.router_pid())], check=True)
    need(watch.wait(20) == 1, watch.output())
    need("no router is running" in host.freeflow("get", "networks", codes=(1,)), "the reason is not printed")
    host.up()
    need(names(host, "networks") == ["blue", "default", "red"], "not all is there again")
    host.freeflow("delete", "network", "red", "blue")


# ---- networks end to end


def bridges(prefix="ffn"):
    links = json.loads(subprocess.run(["ip", "-d", "-j", "link", "show", "type", "bridge"], stdout=subprocess.PIPE, check=True,
                                      text=True).stdout or "[]")
    return {link["ifname"]: link for link in links if link.get("ifname", "").startswith(prefix)}


def own_bridges(host, network=None):
    """Sealed bridges of this host, by what their alias says."""
    path = str(host.run_dir.resolve()).encode()
    number = 0xcbf29ce484222325
    for byte in path:
        number = ((number ^ byte) * 0x100000001b3) & (2**64 - 1)
    prefix = f"freeflow {number & 0xffffffff:08x} "
    found = {link["ifalias"].removeprefix(prefix).split(" ")[0]: link for link in bridges().values()
             if link.get("ifalias", "").startswith(prefix)}
    return found if network is None else found.get(network)


def can_ping(container, address, seconds=20):
    return "no answer" not in container.exec(*INSIDE, "ping", address, 56, seconds, codes=(0, 1))


def same_addresses(host):
    """Two tenants with the same addresses: each has its own, by IP and by RDMA, and nothing of the other's or the host's."""
    apply(host, RED + "---" + BLUE)
    containers = [host.container("red-a", "--network", "red", "--ip", "10.50.0.10"),
                  host.container("red-b", "--network", "red", "--ip", "10.50.0.11"),
                  host.container("blue-a", "--network", "blue", "--ip", "10.50.0.10"),
                  host.container("blue-b", "--network", "blue", "--ip", "10.50.0.12")]
    red_a, red_b, blue_a, blue_b = containers
    try:
        need(can_ping(red_b, "10.50.0.10") and can_ping(blue_b, "10.50.0.10"), "no IP path within a network")
        need(not can_ping(blue_b, "10.50.0.11", 1), "a container of the other network answers")
        macs = [row.split()[4] for one in (red_b, blue_b) for row in one.exec("ip", "neigh").splitlines() if "10.50.0.10" in row]
        need(len(set(macs)) == 2, f"both have the same neighbour: {macs}")
        for server, client in ((red_a, red_b), (blue_a, blue_b)):
            harness.in_two_containers(server, client, ["ibv_rc_pingpong", "-g", "0"], ["ibv_rc_pingpong", "-g", "0", "{ip}"])
        need("default" not in red_a.exec("ip", "route"), "a sealed network has a default route")
        out_to_the_host(host, red_a)
        in_use = host.freeflow("delete", "network", "red", codes=(3,))
        need("red" in in_use, in_use)
    finally:
        for container in containers:
            container.remove()
    need(set(own_bridges(host)) == {"red", "blue"}, f"not a bridge each: {own_bridges(host)}")
    host.freeflow("delete", "network", "blue")
    need(set(own_bridges(host)) == {"red"}, "the bridge outlives its network")


def deleted_under_a_container(host):
    """Whoever has an address next is alone with it: the interface of a container goes with its vNIC."""
    apply(host, RED)
    old = host.container("old", "--network", "red", "--ip", "10.50.0.10")
    new = other = None
    try:
        host.freeflow("delete", "vnic", names(host, "vnics")[0])
        need("ff0" not in old.exec("ip", "-o", "link"), "it keeps its interface")
        new = host.container("new", "--network", "red", "--ip", "10.50.0.10")
        # By program: the router has the command follow.
        by_rest(host, "DELETE", "/vnics/" + names(host, "vnics")[0])
        wait_until(lambda: "ff0" not in new.exec("ip", "-o", "link"), "it keeps its interface")
        other = host.container("other", "--network", "red", "--ip", "10.50.0.10")
        need("10.50.0.10/" in other.exec("ip", "-o", "-4", "address"), "not its address")
    finally:
        for container in filter(None, (old, new, other)):
            container.remove()
    host.freeflow("delete", "network", "red")


def out_to_the_host(host, sealed):
    """Frames that a container makes itself reach the host from `default`, and do not from a sealed network."""
    gateway = json.loads(host.freeflow("network", "ls", "-o", "json"))
    gateway = next(row for row in gateway if row["name"] == "default")["gateway"]
    default_bridge = next(name for name in bridges("ff-") if gateway in subprocess.run(
        ["ip", "-4", "-o", "address", "show", "dev", name], stdout=subprocess.PIPE, text=True, check=True).stdout)
    red_bridge = own_bridges(host, "red")["ifname"]
    mac = {name: pathlib.Path(f"/sys/class/net/{name}/address").read_text().strip() for name in (default_bridge, red_bridge)}
    open_one = host.container("open")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        try:
            listener.bind((gateway, 0))
            port = listener.getsockname()[1]
            sealed.exec("python3", "-c", FRAME, "ff0", mac[red_bridge], "10.50.0.10", gateway, port, "sealed")
            open_one.exec("python3", "-c", FRAME, "ff0", mac[default_bridge], open_one.ip, gateway, port, "open")
            listener.settimeout(20)
            # In order of arrival: what the sealed one sent would be before.
            need(listener.recv(100) == b"open", "a frame of a sealed network reached the host")
        finally:
            open_one.remove()


def bridge_is_mended(host):
    apply(host, RED)
    one, two = (host.container(name, "--network", "red") for name in ("one", "two"))
    try:
        bridge = own_bridges(host, "red")["ifname"]
        subprocess.run(["ip", "link", "delete", "dev", bridge], check=True)
        need(not can_ping(one, two.ip, 1), "the path is not the bridge")
        host.freeflow("up")
        need(can_ping(one, two.ip), "up does not mend the bridge")
        filters = subprocess.run(["tc", "filter", "show", "dev", bridge, "ingress"], stdout=subprocess.PIPE, text=True).stdout
        need("action" in filters, "the mended bridge is not sealed")
    finally:
        one.remove()
        two.remove()
    host.freeflow("delete", "network", "red")


def interfaces_of_others(host):
    """An interface that is called like a vNIC's and is none of this host's is left alone, wherever it is plugged in."""
    apply(host, RED)
    one = host.container("one", "--network", "red")
    other, peer = f"ffv{os.getpid():012x}", f"ffp{os.getpid():x}"
    try:
        (vnic,) = names(host, "vnics")
        bridge = own_bridges(host, "red")["ifname"]
        subprocess.run(["ip", "link", "add", other, "type", "veth", "peer", "name", peer], check=True)
        for alias in ("", f"freeflow 00000000 vnic 2 {vnic}"):
            subprocess.run(["ip", "link", "set", "dev", other, "master", bridge, "alias", alias], check=True)
            host.freeflow("up")
            need(f"master {bridge}" in harness.run(["ip", "link", "show", "dev", other]), "another's interface was taken")
        need(one.exec("ip", "link", "show", "dev", "ff0"), "its own went")
        text = "apiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: %s, labels: {engine: %s}}\nspec: {network: red}\n"
        for name, engine in (("x", "freeflow"), (vnic, "oci")):
            output = apply(host, text % (name, engine), codes=range(1, 128))
            need("metadata.labels.engine" in output, output)
    finally:
        subprocess.run(["ip", "link", "delete", "dev", other], check=False)
        one.remove()
    host.freeflow("delete", "network", "red")


def network_made_again(host):
    """A container that lost its vNIC has no way to those of another tenant's network of the same name."""
    apply(host, RED + "---\napiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: db}\nspec: {network: red}\n")
    old = host.container("old", "--vnic", "db")
    new = None
    try:
        before = own_bridges(host, "red")["ifname"]
        host.freeflow("delete", "vnic", "db")
        host.freeflow("delete", "network", "red")
        apply(host, RED.replace("tenant: red", "tenant: other"))
        new = host.container("new", "--network", "red", "--ip", "10.50.0.77")
        need(own_bridges(host, "red")["ifname"] != before, "the same bridge")
        need(not can_ping(old, "10.50.0.77", 1), "a container of the former network reaches the new one's")
    finally:
        old.remove()
        if new:
            new.remove()
    host.freeflow("delete", "network", "red")


class Unix(http.client.HTTPConnection):
    def __init__(self, host):
        super().__init__("freeflow", timeout=30)
        self.path = str(host.run_dir / "api.sock")

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def by_rest(host, method, path, body=None):
    with contextlib.closing(Unix(host)) as connection:
        connection.request(method, f"/apis/freeflow.io/v1{path}", body and json.dumps(body))
        response = connection.getresponse()
        answer = response.read()
    need(response.status in (200, 201), f"{method} {path}: {response.status} {answer}")


def devices(directory):
    """The networks that the CDI file has devices for."""
    return sorted(device["name"] for device in json.loads((directory / "freeflow.json").read_text())["devices"])


def declared_by_program(host):
    """A network that was made by REST: its first container starts at once, its CDI device comes by itself, and both go with it."""
    cdi = host.directory / "cdi"
    host.freeflow("up", "--cdi-dir", cdi)
    need(devices(cdi) == ["default"], devices(cdi))
    by_rest(host, "PUT", "/networks/red", {"spec": {"tenant": "red", "cidrs": ["10.50.0.0/24"]}})
    one = host.container("one", "--network", "red", "--ip", "10.50.0.7")
    try:
        need(one.ip == "10.50.0.7" and own_bridges(host, "red"), "no container of the new network")
        wait_until(lambda: devices(cdi) == ["default", "red"], lambda: f"no CDI device: {devices(cdi)}\n{host.router_log()}")
    finally:
        one.remove()
    by_rest(host, "DELETE", "/networks/red")
    wait_until(lambda: devices(cdi) == ["default"] and not own_bridges(host, "red"),
               lambda: f"left: {devices(cdi)} {own_bridges(host)}\n{host.router_log()}")


def kept_state():
    """Declared objects outlive `down` with --state, and with them addresses; without, they do not."""
    with Host() as host:
        state = host.directory / "kept"
        host.freeflow("down")
        host.freeflow("up", "--state", state, "--pool", "10.123.0.0/16")
        apply(host, RED + "---\napiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: db}\nspec: {network: red}\n")
        address = get(host, "vnic", "db")["spec"]["addresses"]
        refused = host.freeflow("up", "--state", host.directory / "elsewhere", codes=(1,))
        need("its state in" in refused and str(state) in refused, refused)
        host.container("one").remove()
        host.freeflow("down")
        need((state / "state.redb").exists() and not (host.run_dir / "state.redb").exists(), "not where it should be")
        host.freeflow("up", "--state", state)
        need(names(host, "networks") == ["default", "red"], "networks are lost")
        need(get(host, "vnic", "db")["spec"]["addresses"] == address, "the vNIC has another address")
        need(get(host, "network", "default")["spec"]["cidrs"] == ["10.123.0.0/16"], "the host's network has another pool")
        host.freeflow("up")
        subprocess.run(["kill", "-9", str(host.router_pid())], check=True)
        host.freeflow("up")
        need(names(host, "networks") == ["default", "red"], "the next up forgot where the state is")
        host.freeflow("down")
        host.freeflow("up")
        need(names(host, "networks") == ["default"], "a host without --state has something kept")


def full_store():
    """A store without room takes no change, and the router says so until there is room again."""
    with Host() as host:
        host.freeflow("down")
        state = host.directory / "small"
        state.mkdir()
        harness.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", state])
        filling = state / "filling"
        many = "---\n".join(RED.replace("red", f"red{number}").replace("10.50", f"10.{number}").replace("warm", "w" * 200)
                            for number in range(60, 160))
        try:
            host.freeflow("up", "--state", state)
            need(ready(host) == (200, "ok\n") and health(host) == "Ready", f"{ready(host)} {health(host)}")
            with open(filling, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            need("no space" in apply(host, many, codes=(1,)), "not the reason")
            wait_until(lambda: ready(host)[0] == 500, lambda: f"the router is ready: {ready(host)}")
            need("store: No space" in ready(host)[1], f"the check is not named: {ready(host)}")
            need("run directory" not in ready(host)[1], f"that has room: {ready(host)}")
            wait_until(lambda: health(host).startswith("store: No space"), lambda: f"the host's health: {health(host)}")
            for words in (("get", "hosts"), ("describe", "host")):
                need("store: No space" in host.freeflow(*words), f"{words} does not show it")
            filling.unlink()
            wait_until(lambda: ready(host) == (200, "ok\n") and health(host) == "Ready", lambda: f"{ready(host)} {health(host)}")
            apply(host, many)
            host.freeflow("down")
        finally:
            host.close()
            harness.run(["umount", "--lazy", state])
            state.rmdir()
            shutil.rmtree(host.directory, ignore_errors=True)


def ready(host):
    """The code and the answer of /readyz."""
    with contextlib.closing(Unix(host)) as connection:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, response.read().decode()


def health(host):
    return get(host, "hosts")["items"][0]["status"]["health"]


def wait_until(condition, text):
    end = time.monotonic() + PEER_SECONDS
    while not condition():
        need(time.monotonic() < end, text if isinstance(text, str) else text())
        time.sleep(0.02)


def unknown_network(host):
    output = host.freeflow("run", "--network", "none", "--rm", "--", "true", codes=(125,))
    need("no network is called" in output, output)


def declared_vnic(host):
    apply(host, RED + "---\napiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: db, labels: {tier: server}}\n"
          "spec: {network: red}\n")
    address = get(host, "vnic", "db")["spec"]["addresses"][0]
    for _ in range(2):
        container = host.container("holder", "--vnic", "db")
        try:
            need(container.ip == address and address in container.exec("ip", "-o", "-4", "address"), "not its address")
            need("freeflow0" in container.exec("ibv_devices"), "no device")
            output = host.freeflow("run", "--vnic", "db", "--rm", "--", "true", codes=(125,))
            need("in use by the container holder" in output, output)
            need(container.exec("ibv_devices"), "the refused one harmed it")
        finally:
            container.remove()
        need(get(host, "vnic", "db")["spec"]["addresses"] == [address], "it went with its container")
    need("no vNIC" in host.freeflow("run", "--vnic", "none", "--rm", "--", "true", codes=(125,)), "not the reason")
    host.freeflow("delete", "vnic", "db")
    host.freeflow("delete", "network", "red")


def labelled(host):
    one = host.container("one", "--label", "tier=web", "--label", "a.b/c=d")
    try:
        (vnic,) = get(host, "vnics", "-l", "tier=web")["items"]
        need(vnic["metadata"]["labels"].get("a.b/c") == "d", vnic["metadata"])
        need(vnic["status"]["title"] == "one", vnic["status"])
        need("one" in host.freeflow("describe", "vnic", vnic["metadata"]["name"]), "not described")
        for words in (("describe", "vnic", "one"), ("get", "vnic", "one")):
            need(vnic["metadata"]["name"] in host.freeflow(*words), f"{words}: not by its container")
        need(get(host, "vnic", "one")["metadata"]["name"] == vnic["metadata"]["name"], "another vNIC")
        host.freeflow("describe", "vnic", "two", codes=(4,))
        host.freeflow("run", "--label", "engine=oci", "--rm", "--", "true", codes=(2,))
        output = host.freeflow("run", "--label", "freeflow.io/latency-class=fast", "--rm", "--", "true", codes=(125,))
        need("freeflow.io/latency-class" in output and "low, normal, background" in output, output)
        output = host.freeflow("get", "vnics", "-l", "tier in (web)", codes=(3,))
        need("tier in (web)" in output, output)
    finally:
        one.remove()
    need(not names(host, "vnics"), "a vNIC outlives its container")


def closed_to_others(host):
    """Without a role nobody gets in, and nobody reaches a vNIC's socket by its path."""
    host.directory.chmod(0o711)
    copy = host.directory / "freeflow"
    copy.write_bytes(host.freeflow_path.read_bytes())
    copy.chmod(0o755)
    one = host.container("one")
    try:
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
        output = harness.run([*nobody, str(copy), "--run-dir", str(host.run_dir), "get", "networks"], codes=(5,))
        need("freeflow-admin" in output, output)
        harness.run([*nobody, "ls", str(host.run_dir / "vnics")], codes=(2,))
        harness.run([*nobody, "ls", str(host.run_dir)], codes=(2,))
    finally:
        one.remove()


def across_hosts(lab):
    """A network of one name on two hosts is one, by IP and by RDMA; another with the same addresses is not."""
    lab.wait_for_peers()
    containers = []
    try:
        for number, host in enumerate(lab.hosts, 1):
            ranged = f"10.111.{number}.0/24"
            for text in (RED, BLUE):
                text = text.replace("cidrs: [10.50.0.0/24]", f"cidrs: [10.111.0.0/16], range: {ranged}")
                path = lab.directory / f"objects{number}.yaml"
                path.write_text(text)
                host.freeflow("apply", "-f", path)
        one, two = lab.hosts[:2]
        red_one = one.container("red-one", "--network", "red", "--ip", "10.111.1.50")
        containers.append(red_one)
        red_two = two.container("red-two", "--network", "red", "--ip", "10.111.2.50")
        containers.append(red_two)
        blue_two = two.container("blue-two", "--network", "blue", "--ip", "10.111.2.60")
        containers.append(blue_two)
        end = time.monotonic() + PEER_SECONDS
        while not can_ping(red_one, "10.111.2.50", 1):
            need(time.monotonic() < end, "no IP path between the hosts")
        need(not can_ping(red_one, "10.111.2.60", 1), "the other network answers")
        harness.in_two_containers(red_one, red_two, ["ibv_rc_pingpong", "-g", "0"], ["ibv_rc_pingpong", "-g", "0", "{ip}"])
    finally:
        for container in containers:
            container.remove()


def audited(host, **fields):
    """Lines of the audit log with these fields."""
    lines = [json.loads(line) for line in (host.run_dir / "audit.log").read_text().splitlines()]
    return [line for line in lines if fields.items() <= line.items()]


def wait_for_line(host, **fields):
    wait_until(lambda: audited(host, **fields), lambda: f"{fields} is not in the audit log: {audited(host)[-8:]}")
    line = audited(host, **fields)[-1]
    need(line["uid"] == 0 and line["pid"] > 0 and line["role"] == "admin", f"who: {line}")
    return line


def vnics_audited(host):
    """Whose a vNIC is, where it is, and its addresses: of one that is made for a container, and of one that was declared."""
    apply(host, RED + "---\napiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: db}\nspec: {network: red}\n")
    for name, options in (("made", ("--network", "red")), ("kept", ("--vnic", "db"))):
        container = host.container(name, *options)
        known = {"network": "red", "addresses": [container.ip], "container": name, "kind": "Vnic", "event": "change"}
        line = wait_for_line(host, verb="attach", **known)
        need(line["outcome"] == ("attached" if name == "kept" else "created"), f"{line}")
        if name == "kept":
            need(line["name"] == "db", f"{line}")
            count = len(audited(host, verb="attach"))
            host.freeflow("up")
            need(len(audited(host, verb="attach")) == count, "up notes what was so already")
        container.remove()
        line = wait_for_line(host, verb="detach", **known)
        need(line["outcome"] == ("detached" if name == "kept" else "deleted"), f"{line}")
    host.freeflow("run", "--network", "none", "--", "true", codes=range(1, 126))
    host.freeflow("delete", "vnic", "db")
    host.freeflow("delete", "network", "red")


def operations_audited(lab):
    """Commands of root that change no object."""
    host = lab.hosts[0]
    name = get(host, "hosts")["items"][0]["metadata"]["name"]
    done = {"event": "change", "kind": "Host", "name": name}
    refused = {"event": "refused", "kind": "Host", "name": name}
    host.freeflow("peers", "reload")
    need(wait_for_line(host, verb="reload-peers", **done)["detail"] == "hosts=1", "how many")
    path = host.run_dir / "peers.json"
    text = path.read_text()
    try:
        path.write_text("{}")
        host.freeflow("peers", "reload", codes=(1,))
    finally:
        path.write_text(text)
    need("peers.json" in wait_for_line(host, verb="reload-peers", outcome="Invalid", **refused)["reason"], "why")
    host.freeflow("wire", "faults", "--loss", "0.1%", "--seed", "7")
    need(wait_for_line(host, verb="wire-faults", outcome="begun", **done)["detail"] == "seed=7 loss_ppm=1000", "which")
    host.freeflow("wire", "faults", "off")
    wait_for_line(host, verb="wire-faults", outcome="ended", **done)
    log = (host.run_dir / "router.log").read_text()
    need("faults of the wire seed=7 loss_ppm=1000 duplicate_ppm=0" in log and "WireFaults" not in log, log[-2000:])
    capture = Running(host.command("capture", "-s", "600", "-w", host.run_dir / "packets"))
    try:
        need(wait_for_line(host, verb="capture", outcome="begun", **done)["detail"] == "seconds_max=600", "limits")
        host.freeflow("capture", "-s", "1", codes=(1,))
        wait_for_line(host, verb="capture", outcome="AlreadyExists", **refused)
        capture.terminate()
        need("lost=0" in wait_for_line(host, verb="capture", outcome="ended", **done)["detail"], "what came of it")
    finally:
        capture.kill()
    alone = {"event": "refused", "kind": "Host"}
    with Host() as other:
        other.freeflow("peers", "reload", codes=(1,))
        wait_for_line(other, verb="reload-peers", outcome="NotFound", **alone)
        other.freeflow("wire", "faults", "--loss", "1%", codes=(1,))
        wait_for_line(other, verb="wire-faults", outcome="Invalid", **alone)
        other.freeflow("down")
        wait_for_line(other, verb="shutdown", outcome="done", event="change")


@pytest.mark.parametrize("promise", [
    life_of_an_object, several_deleted, refusals, watched, router_killed, unknown_network, labelled, declared_vnic,
    same_addresses, deleted_under_a_container, bridge_is_mended, interfaces_of_others, network_made_again,
    declared_by_program, closed_to_others, vnics_audited])
def test_objects(host, promise):
    try:
        promise(host)
    except BaseException:
        # Its remains must not be the next one's trouble.
        for name in ("red", "blue"):
            host.freeflow("delete", "network", name, "--ignore-not-found", codes=(0, 1, 3, 4))
        raise


def test_down_leaves_no_bridge(host):
    apply(host, RED)
    host.container("last", "--network", "red").remove()
    need(own_bridges(host), "no bridge to remove")
    host.freeflow("down")
    need(not own_bridges(host), "a bridge is left")


def test_kept_state():
    kept_state()


def test_full_store():
    full_store()


@pytest.fixture(scope="module")
def lab():
    with Lab(2) as lab:
        yield lab


def test_across_hosts(lab):
    across_hosts(lab)


def test_operations_are_audited(lab):
    operations_audited(lab)
