"""Sealed hosts: perftest between two of them, nothing in the clear, forged and copied datagrams dropped and counted; and
what a sealed host and a plain one make of each other.
"""

import json
import re
import time

import pytest

import harness
from harness import Lab, Running, forgery, need, perftest, wire

MTU = 4200
ROWS = [
    "ib_send_bw -F -n 200",
    "ib_send_lat -F -n 200 -I 64",
    "ib_write_bw -F -n 200 -s 1048577",
    "ib_read_bw -F -n 200 -q 4",
    "ib_atomic_bw -F -n 200",
    "ib_write_bw -c UC -F -n 200 -s 12289",
    "ib_send_bw -c UD -F -n 200",
    "ib_send_bw -c XRC -F -n 200 -s 65537",
]
REFUSALS = (
    "unsealed", "unknown_key", "wrong_shard", "replayed", "bad_tag", "bad_icrc", "unwanted_frames", "malformed",
)
# The pingpong's client has its buffers full of this.
PAYLOAD = "7b" * 32
WATCHED = 500
REASON = 'in both peers files'  # the log escapes the quotes before it

# What is sent, and the counters of the victim's router that together report it.
FORGERIES = [
    ("write", ["unsealed"]),
    ("acknowledge", ["unsealed"]),
    ("datagram", ["unsealed"]),
    ("management", ["unsealed"]),
    ("noise", ["unsealed", "unknown_key", "truncated"]),
]
REPLAYS = [
    ("unchanged", ["replayed"]),
    ("key", ["unknown_key"]),
    ("shard", ["wrong_shard"]),
    ("counter", ["bad_tag"]),
    ("text", ["replayed"]),  # looked at first: it is cheaper
    ("tag", ["replayed"]),
]


def peers_of(host):
    return json.loads(host.freeflow("peers", "ls", "-o", "json"))["peers"]


def pingpong(server, client, *options):
    words = ["ibv_rc_pingpong", "-g", "0", *options]
    return harness.in_two_containers(server, client, words, [*words, "{ip}"])


def watched(lab, pair):
    """What who sits on the link sees of a pingpong."""
    spy = Running(lab.host(1).enter(*forgery.SPY, "watch", PAYLOAD, WATCHED))
    try:
        spy.wait_for_output("ready")
        while spy.process.poll() is None:
            pingpong(*pair, "-n", "200")
        need(spy.wait(30) == 0, spy.output())
        found, sealed = re.search(rf"(\d+) of {WATCHED} have it, (\d+) are sealed", spy.output()).groups()
        return int(found), int(sealed)
    finally:
        spy.kill()


def set_wire(host, kind):
    """As an administrator does it."""
    path = host.run_dir / "peers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wire": kind}))
    host.freeflow("peers", "reload")


def until_peers(lab, what, is_so, seconds=20):
    end = time.monotonic() + seconds
    while not all(is_so(peer) for host in lab.hosts for peer in peers_of(host)):
        need(time.monotonic() < end, f"{what}: {[peers_of(host) for host in lab.hosts]}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def lab():
    with Lab(2, MTU, "--wire", "sealed") as lab:
        lab.wait_for_peers()
        yield lab


@pytest.fixture(scope="module")
def pair(lab):
    return lab.pair()


@pytest.mark.parametrize("words", ROWS)
def test_perftest(lab, server, client, words):
    perftest.one(server, client, wire.patient(words.split()), lab.directory)


def test_random_requests(server, client):
    wire.model(server, client)


def test_both_hosts_say_that_they_are_sealed(lab, pair):
    for host in lab.hosts:
        for peer in peers_of(host):
            need(peer["sealed"] and not peer["icrc"] and peer["problem"] is None, peer)
        need(all(other["sealed"] for other in host.wire()["hosts"]), host.wire()["hosts"])
        need("1 of 1 connected, packets sealed" in host.freeflow("status"), host.freeflow("status"))
        need(re.search(r"freeflow +sealed", host.freeflow("wire", "status")), host.freeflow("wire", "status"))


def test_packets_carried_it_and_none_was_refused(lab, pair):
    wire.went_through_packets(lab.host(1))
    for host in lab.hosts:
        found = forgery.refusals(host)
        need(found.get("keys_used", 0) >= 1 and "no_key" not in found, found)
        need(not any(name in found for name in REFUSALS), found)


def test_random_requests_on_a_bad_network(lab, server, client):
    """Packets lost, doubled, overtaken and spoilt; a spoilt one has a wrong tag."""
    for host in lab.hosts:
        host.freeflow("wire", "faults", "--loss", "0.2%", "--duplicate", "0.5%", "--reorder", "0.5%", "--corrupt", "0.5%")
    try:
        wire.model(server, client)
    finally:
        for host in lab.hosts:
            host.freeflow("wire", "faults", "off")
    for host in lab.hosts:
        found = forgery.refusals(host)
        need(found.get("bad_tag", 0) > 0 and "bad_icrc" not in found and "malformed" not in found, found)


def test_nothing_is_in_the_clear(lab, pair):
    need(watched(lab, pair) == (0, WATCHED), "the payload of a pingpong was on the link")


@pytest.fixture(scope="module")
def victim(pair):
    return forgery.Victim(*pair)


@pytest.mark.parametrize("kind, names", FORGERIES, ids=[kind for kind, _ in FORGERIES])
def test_forged_with_the_peers_address(lab, victim, kind, names):
    """By root of the peer's host itself: packets that a plain host would take, or at least look at."""
    one, other = lab.hosts
    before = forgery.refusals(one)
    harness.run(other.enter(*forgery.FORGE, kind, forgery.address_of(other), forgery.address_of(one), victim.qpn, victim.rkey,
                            victim.address, forgery.COUNT))
    forgery.counted(one, names, before, forgery.COUNT)
    if kind != "noise":
        now = forgery.refusals(one)
        others = {name: count for name, count in now.items() if name in one.wire()["drops"] and count != before.get(name, 0)}
        need(not others, f"some got as far as the queue pairs: {others}")
    victim.need_alive()


@pytest.mark.parametrize("how, names", REPLAYS, ids=[how for how, _ in REPLAYS])
def test_sent_once_more(lab, victim, how, names):
    """Datagrams of the victim's peer, seen on the link and put there again."""
    one, other = lab.hosts
    before = forgery.refusals(one)
    harness.run(other.enter(*forgery.SPY, "replay", how, forgery.COUNT))
    # The copy may overtake its original, which is then the one that came before.
    forgery.counted(one, names, before, forgery.COUNT)
    victim.need_alive()


def test_the_victim_has_not_noticed(victim):
    victim.stop()


def test_metrics_count_what_was_dropped(lab):
    text = harness.run(["curl", "--silent", "--fail", "--unix-socket", lab.host(1).run_dir / "api.sock", "http://host/metrics"])
    counts = dict(re.findall(r'^freeflow_wire_drops_total\{reason="(\w+)"\} (\d+)$', text, re.MULTILINE))
    for reason in ("unsealed", "unknown_key", "wrong_shard", "replayed", "bad_tag"):
        need(int(counts.get(reason, 0)) >= forgery.COUNT, f"{reason}: {counts}")


def test_a_capture_shows_what_is_inside(lab, server, client):
    path = lab.directory / "inside.pcapng"
    capture = Running([*lab.host(1).command("capture", "-w", path, "-c", 50, "-s", 30)])
    try:
        while capture.process.poll() is None:
            pingpong(server, client, "-n", "50")
        need(capture.wait(30) == 0, capture.output())
    finally:
        capture.kill()
    need(bytes.fromhex(PAYLOAD) in path.read_bytes(), "the capture has no payload in it")


def test_hosts_of_different_kinds():
    """A lab that is plain, in which first one host and then the other becomes sealed."""
    with Lab(2, MTU) as lab:
        lab.wait_for_peers()
        pair = server, client = lab.pair()
        found, sealed = watched(lab, pair)
        need(found > WATCHED / 10 and sealed == 0, f"the spy sees nothing: {found} of {WATCHED}, {sealed} sealed")
        set_wire(lab.host(2), "sealed")
        until_peers(lab, "a reason", lambda peer: peer["state"] != "up" and REASON in (peer["problem"] or ""))
        for host in lab.hosts:
            for command in (("status",), ("peers", "ls")):
                need(REASON in host.freeflow(*command), host.freeflow(*command))
            need(REASON in (host.run_dir / "router.log").read_text(), "the log does not say why")
        sent = [host.wire()["counters"].get("packets_sent", 0) for host in lab.hosts]
        waits = server.start("ibv_rc_pingpong", "-g", "0", "-n", "10")
        server.wait_for_port(waits)
        output = client.exec("ibv_rc_pingpong", "-g", "0", "-n", "10", server.ip, codes=(1,))
        need("transport retry counter exceeded" in output, output)
        waits.kill()
        after = [host.wire()["counters"].get("packets_sent", 0) for host in lab.hosts]
        need(after[1] == sent[1], f"the sealed host sent {after[1] - sent[1]} packets")
        set_wire(lab.host(1), "sealed")
        until_peers(lab, "connected", lambda peer: peer["state"] == "up" and peer["sealed"] and peer["problem"] is None)
        need(watched(lab, pair) == (0, WATCHED), "not everything is sealed")
