"""Names by which the containers of a network find each other, on one host: the file at their /etc/hosts."""

import json
import os
import pathlib
import signal
import time

import pytest

from harness import Host, Running, need
from harness.settings import PORT

NETWORKS = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24, "fd00:50::/64"]}
---
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: blue}
spec: {tenant: blue, cidrs: [10.50.0.0/24]}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: database}
spec: {network: red, addresses: [10.50.0.200]}
"""


@pytest.fixture(scope="module")
def named():
    before = pathlib.Path("/etc/hosts").read_bytes()
    with Host() as host:
        path = host.directory / "networks.yaml"
        path.write_text(NETWORKS)
        host.freeflow("apply", "-f", path)
        yield host
    need(pathlib.Path("/etc/hosts").read_bytes() == before, "the machine's own hosts file is another one")


def addresses(container, name):
    """As programs of a container find them."""
    output = container.exec("getent", "ahosts", name, codes=(0, 2))
    return list(dict.fromkeys(line.split()[0] for line in output.splitlines() if line))


def wait_until(what, so, seconds=15):
    end = time.monotonic() + seconds
    while not so():
        need(time.monotonic() < end, what)
        time.sleep(0.05)


def test_containers_find_each_other_by_name(named):
    one = named.container("one", "--network", "red")
    two = named.container("two", "--network", "red")
    try:
        found = addresses(one, "two")
        need(two.ip in found and any(address.startswith("fd00:50::") for address in found), f"{found}")
        need(addresses(one, "one")[-1:] and one.ip in addresses(two, "one"), "its own name, or the earlier one's")
        need("127.0.0.1" in addresses(one, "localhost") or "::1" in addresses(one, "localhost"), "localhost")
        server = two.start("ib_write_bw", "-n", "100", "-p", PORT)
        two.wait_for_port(server)
        one.exec("ib_write_bw", "-n", "100", "-p", PORT, "two")
        need(server.wait(20) == 0, server.output())
    finally:
        two.remove()
    need(addresses(one, "two") == [], "the name of one that is gone")
    one.remove()


def test_names_are_a_networks_own(named):
    red, blue = named.container("red-one", "--network", "red"), named.container("blue-one", "--network", "blue")
    try:
        need(addresses(red, "blue-one") == [] == addresses(blue, "red-one"), "a name of another tenant")
        need("blue" not in red.exec("cat", "/etc/hosts"), "a word of another tenant")
        need(addresses(blue, "blue-one") and "10.50.0.200" in addresses(red, "database"), "names of its own")
    finally:
        red.remove()
        blue.remove()


def test_a_declared_vnic_has_its_own_name_and_its_containers(named):
    one = named.container("one", "--network", "red")
    named.freeflow("run", "-d", "--vnic", "database", "--name", "holder", "--", "sleep", "infinity")
    try:
        need(addresses(one, "holder") == addresses(one, "database") and "10.50.0.200" in addresses(one, "holder"), "it is not named")
        named.freeflow("rm", "-f", "holder")
        need(addresses(one, "holder") == [] and addresses(one, "database"), "its name is not its container's any more")
        named.freeflow("delete", "vnic", "database")
        need(addresses(one, "database") == [], "the name of one that was deleted")
    finally:
        one.remove()


def test_a_supervisor_that_is_killed_leaves_its_name_until_it_is_settled(named):
    one, two = named.container("one"), named.container("two")
    try:
        record = json.loads((named.run_dir / "containers" / "two.json").read_text())
        os.kill(record["supervisor"]["pid"], signal.SIGKILL)
        wait_until("the name stays", lambda: named.freeflow("ps") and addresses(one, "two") == [])
    finally:
        one.remove()
        two.remove()


def test_a_container_can_have_a_hosts_file_of_its_own(named):
    other = named.container("other")
    own = named.directory / "own"
    own.write_text("192.0.2.7 elsewhere\n")
    machines = pathlib.Path("/etc/hosts").read_text()
    try:
        text = named.freeflow("run", "--rm", "--no-names", "--", "cat", "/etc/hosts")
        need(text == machines, text)
        text = named.freeflow("run", "--rm", "-v", f"{own}:/etc/hosts:ro", "--", "cat", "/etc/hosts")
        need(text == own.read_text(), text)
        # By default in a view of its own, too, and nobody there writes it.
        text = named.freeflow("run", "--rm", "--name", "self", "--", "sh", "-c",
                              "cat /etc/hosts; echo 192.0.2.1 x >>/etc/hosts || echo refused")
        need(f"{other.ip} other" in text and " self" in text and "refused" in text, text)
        need(text.startswith(machines[:40]), text)
    finally:
        other.remove()


def test_who_reads_while_names_come_and_go_sees_whole_lines(named):
    """A thousand readings of a container's file, beside others that come and go."""
    reader = named.container("reader", "--network", "blue")
    script = ("i=0; while [ $i -lt 400 ]; do getent hosts reader >/dev/null || exit 1; "
              "grep -v -E '^$|^#|^[0-9a-f:.]+[[:space:]]+[[:alnum:]._ \t-]+$' /etc/hosts && exit 2; i=$((i+1)); done; echo whole")
    watch = Running(reader.command("sh", "-c", script))
    try:
        for number in range(4):
            container = named.container(f"come-{number}", "--network", "blue")
            container.remove()
        need(watch.wait(60) == 0 and "whole" in watch.output(), watch.output())
    finally:
        watch.kill()
        reader.remove()


def test_a_networks_file_is_there_for_other_engines(named):
    """Before any container of the network, and the same one for good: podman can mount it."""
    path = named.run_dir / "names" / "blue"
    inode = path.stat().st_ino
    need((path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o644), "who reads it")
    container = named.container("x", "--network", "blue")
    need(path.stat().st_ino == inode and f"{container.ip} x" in path.read_text(), "it is another file")
    container.remove()
    named.freeflow("down", "--force")
    need(not list(named.run_dir.glob("names*")), "names are left")
    named.up()
    need((named.run_dir / "names" / "default").exists(), "no file before the first container")
