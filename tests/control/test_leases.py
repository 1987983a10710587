"""A host that has not reached etcd for long stops its vNICs, and then others get its blocks and declared vNICs.

The cases go in this order, on one laboratory of three hosts: what one leaves, the next one finds.
"""

import datetime
import json
import os
import pathlib
import re
import signal

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, following
from harness.settings import PORT

AFTER_S = 30
# Of two blocks, for three hosts.
SMALL = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: small}
spec: {tenant: red, cidrs: [10.51.0.0/28]}
"""
RED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24]}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: database}
spec: {network: red}
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    with following(RED, "red") as hosts:
        hosts.as_operator("cluster", "set", "--reclaim-after", f"{AFTER_S}s")
        hosts.wait("hosts say so", lambda: all(lease(hosts, number)["afterS"] == AFTER_S for number in HOSTS))
        hosts.apply(SMALL)
        hosts.wait("both blocks are given", lambda: len(blocks(hosts, "small")) == 2)
        yield hosts


def lease(hosts, number):
    host = hosts.host(number)
    path = f"/apis/freeflow.io/v1/hosts/host{number}/lease"
    return json.loads(harness.run(["curl", "-sS", "--unix-socket", host.run_dir / "api.sock", f"http://freeflow{path}"], 20))["status"]


def blocks(hosts, network):
    """By host."""
    words = ["get", "--prefix", f"/freeflow/blocks/data/{network}/"]
    lines = hosts.etcd.ctl(*words, at=1).splitlines()
    return {key.rsplit("/", 1)[1]: block for key, block in zip(lines[::2], lines[1::2])}


def vnics(hosts, number, network):
    items = json.loads(hosts.host(number).freeflow("get", "vnics", "-o", "json"))["items"]
    return [item["metadata"]["name"] for item in items if item["spec"]["network"] == network]


def audited(hosts, number, what):
    """When the router noted this last, seconds of Unix time."""
    lines = [json.loads(line) for line in (hosts.host(number).run_dir / "audit.log").read_text().splitlines()]
    times = [line["time"] for line in lines if line.get("what") == what]
    return datetime.datetime.fromisoformat(times[-1].replace("Z", "+00:00")).timestamp() if times else None


def reclaimed(hosts, number):
    """When a controller was done with taking back what a host had, and how much that was."""
    pattern = rf"([\d.]+) the host host{number} is silent for too long: (\d+) blocks and (\d+) vNICs are taken back"
    found = re.findall(pattern, hosts.log(1))
    return (float(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else None


def follower(hosts, number):
    return json.loads((hosts.host(number).run_dir / "cluster.pid").read_text())["pid"]


def test_a_host_that_is_cut_off_stops_its_vnics_before_another_one_has_its_block(hosts):
    second = hosts.host(2)
    need(sorted(blocks(hosts, "small")) == ["host1", "host2"], "the third host has a block")
    block = blocks(hosts, "small")["host2"]
    container = second.container("small", "--network", "small")
    database = second.container("database", "--rm", "--vnic", "database")
    waiting = container.start(harness.program("load"), "-a")
    waiting.wait_for_output("ready")
    need("lease ended" not in (second.run_dir / "audit.log").read_text(), "it had no lease while etcd was there")
    hosts.lab.cut(2)
    try:
        need(waiting.wait(AFTER_S + 60) == 0 and "fatal" in waiting.output(), waiting.output())
        ended = audited(hosts, 2, "lease ended")
        need(audited(hosts, 2, "cluster lost") < ended, "the audit log has no word of etcd")
        hosts.wait("the third host has the block", lambda: blocks(hosts, "small").get("host3") == block)
        at, block_count, vnic_count = hosts.wait("the controller says so", lambda: reclaimed(hosts, 2))
        need((block_count, vnic_count) == (2, 1), f"{block_count} {vnic_count}")
        need(ended < at, f"the lease ended at {ended}, and all was taken back at {at}")
        hosts.wait("they are gone", lambda: not vnics(hosts, 2, "small") and not vnics(hosts, 2, "red"))
        for words in (["--network", "red"], ["--network", "small"]):
            failure = second.freeflow("run", "--rm", *words, "--", "true", codes=(125,))
            need("no lease" in failure, failure)
        row = next(row for row in hosts.status(at=3)["hosts"] if row["name"] == "host2")
        need(row["reclaimed"], f"{row}")
        # Another host has its vNIC, without force, and its block.
        moved = hosts.host(3).container("database", "--rm", "--vnic", "database")
        need(moved.ip == database.ip, f"{moved.ip} {database.ip}")
        moved.remove()
        hosts.wait("the third host runs containers there",
                   lambda: hosts.host(3).freeflow("run", "--rm", "--network", "small", "--", "true", codes=(0,)) is not None)
        # A router that begins again has no lease either.
        harness.kill_router(second)
        second.freeflow("up")
        need(not vnics(hosts, 2, "small") and not vnics(hosts, 2, "red"), "vNICs are there again")
        failure = second.freeflow("run", "--rm", "--network", "red", "--", "true", codes=(125,))
        need("no lease" in failure, failure)
    finally:
        hosts.lab.heal(2)
    hosts.wait("it has its lease again", lambda: not lease(hosts, 2)["isOver"])
    hosts.wait("it has a block again", lambda: "host2" in blocks(hosts, "red"))
    for leftover in (container, database):
        second.freeflow("rm", "-f", leftover.name, codes=(0, 1))
    server = hosts.wait("containers start there", lambda: second.container("again", "--network", "red"))
    client = hosts.host(3).container("client", "--network", "red")
    words = ["ibv_rc_pingpong", "-g", "0", "-p", PORT]
    harness.in_two_containers(server, client, words, [*words, "{ip}"])
    # The block of the small network is another's by now, and no other one is left.
    failure = second.freeflow("run", "--rm", "--network", "small", "--", "true", codes=(125,))
    need("no lease" in failure, failure)
    server.remove()
    client.remove()


def test_a_router_ends_its_vnics_also_when_its_follower_is_dead(hosts):
    second = hosts.host(2)
    container = second.container("alone", "--network", "red")
    waiting = container.start(harness.program("load"), "-a")
    waiting.wait_for_output("ready")
    before = audited(hosts, 2, "lease ended")
    os.kill(follower(hosts, 2), signal.SIGKILL)
    need(waiting.wait(AFTER_S + 60) == 0 and "fatal" in waiting.output(), waiting.output())
    need(audited(hosts, 2, "lease ended") > before, "the router has not said so")
    hosts.wait("its block is free", lambda: "host2" not in blocks(hosts, "red"))
    second.freeflow("up")
    hosts.wait("it has its lease again", lambda: not lease(hosts, 2)["isOver"])
    second.freeflow("rm", "-f", container.name, codes=(0, 1))
    again = hosts.wait("containers start there", lambda: second.container("again", "--network", "red"))
    again.remove()


def test_the_audit_log_says_when_etcd_is_away_and_back(hosts):
    before = audited(hosts, 2, "cluster lost")
    hosts.lab.cut(2)
    try:
        hosts.wait("it is lost", lambda: audited(hosts, 2, "cluster lost") > before)
    finally:
        hosts.lab.heal(2)
    hosts.wait("it is there again", lambda: (audited(hosts, 2, "cluster regained") or 0) > audited(hosts, 2, "cluster lost"))
    hosts.wait("it has its lease", lambda: not lease(hosts, 2)["isOver"])
    # The member that was cut off has others elect a leader.
    hosts.etcd.wait_until_healthy()


def test_a_host_that_comes_back_without_its_state_has_no_lease_until_etcd_has_its_word(hosts):
    second = hosts.host(2)
    said = ["--prefix", "/freeflow/said/host2/"]
    # It reads etcd, and can't write its word.
    hosts.etcd.ctl("role", "revoke-permission", "host2", *said)
    second.freeflow("down", "--force")
    # As when the machine has started again: the run directory is in memory.
    (second.run_dir / "cluster.lease").unlink()
    try:
        hosts.join(2)
        hosts.wait("it has its networks again", lambda: hosts.network(2, "red"))
        need(lease(hosts, 2)["isOver"], f"it has a lease by no word: {lease(hosts, 2)}")
        failure = second.freeflow("run", "--rm", "--network", "red", "--", "true", codes=(125,))
        need("no lease" in failure, failure)
    finally:
        hosts.etcd.ctl("role", "grant-permission", "host2", "readwrite", *said)
    hosts.wait("it has a lease", lambda: not lease(hosts, 2)["isOver"])
    again = hosts.wait("containers start there", lambda: second.container("again", "--network", "red"))
    again.remove()


def test_a_router_without_its_files_has_no_lease_but_that_of_the_one_before(hosts):
    """Its follower goes on, and etcd is away: it must not make vNICs that others have by now. `up` ends the follower
    first, so somebody else has started the router."""
    second = hosts.host(2)
    hosts.wait("it has a lease", lambda: not lease(hosts, 2)["isOver"])
    words = pathlib.Path(f"/proc/{second.router_pid()}/cmdline").read_bytes().decode().split("\0")[:-1]
    at = words.index("--ready-fd")
    router = None
    hosts.lab.cut(2)
    try:
        hosts.wait("its lease is over", lambda: lease(hosts, 2)["isOver"])
        harness.kill_router(second)
        for name in ("state.redb", "cluster.lease"):
            (second.run_dir / name).unlink()
        router = harness.Running(second.enter(*words[:at], *words[at + 2:]))
        hosts.wait("it has its networks again", lambda: hosts.network(2, "red"))
        again = lease(hosts, 2)
        need(again["afterS"] == AFTER_S and again["isOver"], f"{again}")
        failure = second.freeflow("run", "--rm", "--network", "red", "--", "true", codes=(125,))
        need("no lease" in failure, failure)
    finally:
        if router:
            router.kill()
        hosts.lab.heal(2)
        second.freeflow("up")
    hosts.wait("it has its lease again", lambda: not lease(hosts, 2)["isOver"])
    container = hosts.wait("containers start there", lambda: second.container("later", "--network", "red"))
    container.remove()


def test_an_operator_ends_that_for_all_hosts(hosts):
    printed = hosts.wait("etcd takes it", lambda: hosts.as_operator("cluster", "set", "--reclaim-after", "never"))
    need("stay its" in printed, printed)
    hosts.wait("routers have no lease to keep", lambda: all(lease(hosts, number)["afterS"] is None for number in HOSTS), 150)
    failure = hosts.as_operator("cluster", "set", "--reclaim-after", "5s", codes=(2,))
    need("20s" in failure, failure)


def test_a_backup_is_declared_again_where_nothing_is(hosts):
    path = hosts.lab.directory / "backup.yaml"
    path.write_text(hosts.as_operator("cluster", "export"))
    failure = hosts.as_operator("cluster", "import", path, codes=(3,))
    need("nothing was changed" in failure and "--force" in failure, failure)
    printed = hosts.as_operator("cluster", "import", path, "--force")
    need("network/red unchanged" in printed and "vnic/database unchanged" in printed, printed)
    hosts.as_operator("delete", "vnic", "database")
    hosts.wait("networks can be deleted", lambda: "deleted" in hosts.as_operator("delete", "network", "red", "small"))
    hosts.wait("all is gone", lambda: not blocks(hosts, "red") and not blocks(hosts, "small"))
    printed = hosts.as_operator("cluster", "import", path)
    need("network/red created" in printed and "vnic/database created" in printed, printed)
    hosts.wait("hosts have it", lambda: hosts.network(2, "red"))
