"""Routers with several engines side by side: which vNIC is whose, and RDMA within a shard, between shards, between hosts."""

import json

import pytest

import harness
from harness import Lab, cm, need, perftest, rdmacm, statuses, tenants, wire

MTU = 4200
COUNT = 4
NAMES = ("one", "two", "three", "four")
GROUP = "239.1.2.9"
# One of each kind of request and of each service.
WORDS = ["ib_write_bw -F -n 500 -s 65536", "ib_send_bw -F -n 500 -s 65537 -b", "ib_read_bw -F -n 200 -s 10001",
         "ib_send_lat -F -n 200 -s 64 -e", "ib_atomic_lat -F -n 100", "ib_send_bw -c UD -F -n 200 -s 1024",
         "ib_send_bw -c XRC -F -n 200", "ib_write_bw -c UC -F -n 200", "ib_write_bw -R -F -n 200 -q 4"]


def vnics(host):
    return {vnic["name"]: vnic for vnic in host.status()["vnics"]}


def shard_of(container):
    return vnics(container.host)[container.name]["shard"]


def paths(host):
    return {qp["path"] for qp in json.loads(host.freeflow("ps", "--qps", "-o", "json"))}


@pytest.fixture(scope="module")
def lab():
    with Lab(2, MTU, "--shards", COUNT, "--shard-by", "vnic") as lab:
        yield lab


@pytest.fixture(scope="module")
def ends(lab):
    """Each of its own shard, on the first host."""
    ends = [lab.host(1).container(name) for name in NAMES]
    need({shard_of(end) for end in ends} == set(range(COUNT)), f"not spread: {vnics(lab.host(1))}")
    return ends


@pytest.fixture(scope="module")
def far(lab):
    return [lab.host(2).container(f"far-{name}") for name in NAMES]


@pytest.mark.parametrize("words", WORDS)
def test_between_shards(lab, ends, words):
    perftest.one(ends[0], ends[1], words.split(), lab.directory)


@pytest.mark.parametrize("words", WORDS)
def test_between_hosts(lab, ends, far, words):
    perftest.one(ends[2], far[1], wire.patient(words.split()), lab.directory)


def test_random_requests(ends, far):
    wire.model(ends[0], ends[3])
    for one, other in zip(ends, reversed(far)):
        wire.model(one, other)


def test_each_status_is_that_of_two_hosts(ends):
    """Errors, flushes, events: as between hosts."""
    statuses.two_containers(ends[1], ends[2], harness.program("statuses"), ["write_key_wrong", "send_rc", "one_sided_rc", "multicast"])


def test_connections(ends, far):
    for server, client in ((ends[0], ends[1]), (ends[3], far[0])):
        with cm.listening(server, "rping", "-s", "-a", server.ip, "-C", "10", "-v") as listener:
            client.exec("rping", "-c", "-a", server.ip, "-C", "10", "-v")
            cm.finish(listener, 30)


def test_a_group_has_members_in_all_shards(ends, far):
    """The other host sends one copy; members of every shard hear it, as those of the sender's own host do."""
    rdmacm.multicast((*ends, far[1]), far[0], group=GROUP)


def test_nothing_was_dropped_and_sockets_got_their_own(lab, ends, far):
    wire.went_through_packets(lab.host(1))
    counters = lab.host(1).wire()["counters"]
    need(not counters.get("strays"), f"a router that knows of the shards sends packets to the wrong one: {counters}")
    need(not lab.host(1).wire()["drops"], f"{lab.host(1).wire()['drops']}")


def test_a_router_without_shards_and_one_with(lab, far):
    """Each host has its own number of them."""
    with Lab(2, MTU, "--shards", "1") as mixed:
        host = mixed.host(2)
        host.freeflow("down")
        host.up_options = ("--shards", str(COUNT), "--shard-by", "vnic", "--peers", host.run_dir / "peers.json")
        words = ["up", *host.up_options, "--pool", "10.111.0.0/16", "--range", "10.111.2.0/24", "--host", "host2",
                 "--address", "192.168.240.2"]
        harness.run([*mixed.command("lab", "enter", "--host", 2, "--"), mixed.freeflow_path, "--run-dir", host.run_dir, *words])
        mixed.wait_for_peers()
        one, others = mixed.host(1).container("one"), [host.container(name) for name in NAMES]
        for other in others:
            wire.model(one, other)
            perftest.one(other, one, wire.patient("ib_write_bw -F -n 200 -s 65536 -q 4".split()), mixed.directory)
        need(not mixed.host(2).wire()["counters"].get("strays"), f"{mixed.host(2).wire()}")


def test_a_tenant_stays_in_one_shard():
    """And reaches its own past the router, as with one engine; another tenant is elsewhere."""
    with Lab(1, MTU, "--shards", COUNT) as lab:
        host = lab.host(1)
        red, blue = (tenants.NETWORK.format(name=name, cidrs=f"cidrs: [10.6{number}.0.0/24]", more="")
                     for number, name in enumerate(("red", "blue")))
        tenants.apply(host, red + blue)
        reds = [host.container(f"red-{number}", "--network", "red") for number in range(3)]
        blues = [host.container(f"blue-{number}", "--network", "blue") for number in range(3)]
        shards = [{shard_of(end) for end in of_tenant} for of_tenant in (reds, blues)]
        need([len(of_tenant) for of_tenant in shards] == [1, 1] and shards[0] != shards[1], f"{shards}")
        server = reds[0].start("ib_write_bw", "-F", "-D", "4", "-s", "65536")
        reds[0].wait_for_port(server)
        client = reds[1].start("ib_write_bw", "-F", "-D", "4", "-s", "65536", reds[0].ip)
        cm.wait_until(lambda: "direct" in paths(host), lambda: f"{paths(host)}", 20)
        for running in (client, server):
            need(running.wait(20) == 0, running.output())


@pytest.mark.parametrize("count", ["0", "3", "16", "many"])
def test_other_numbers_are_refused(count):
    host = harness.host.RunDirectory()
    host.begin()
    try:
        output = host.freeflow("up", "--shards", count, codes=(2,))
        need("1, 2, 4, 8" in output, output)
    finally:
        harness.host.shutil.rmtree(host.directory, ignore_errors=True)
