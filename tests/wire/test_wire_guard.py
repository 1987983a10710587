"""Only the router speaks RoCEv2 for its host: not its users, nor containers in the host's network, nor those behind the address
translation of another engine. What they send to UDP 4791 is refused and counted, and nothing of it reaches another host.
"""

import contextlib
import json
import os
import subprocess

import pytest

import harness
from harness import Running, need
from harness.settings import PROGRAMS

INSIDE = ["python3", str(PROGRAMS / "wire_guard_inside.py")]
ROCE_PORT, OTHER_PORT = 4791, 4801
COUNT = 5
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]
# A container in the host's network, started with --cap-drop all, with root in there.
CAPLESS_ROOT = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
# By which of these the router counts a datagram of ours, it may choose.
REFUSALS = ("unknown_source", "wrong_source", "malformed", "truncated", "bad_icrc", "wrong_pkey", "unknown_qpn")


def address_of(host):
    return f"192.168.240.{host.number}"


def guards(host):
    """The guards in iptables in the host's network, without counts."""
    found = []
    for program in ("iptables", "ip6tables"):
        text = harness.run(host.enter(program, "-w", "-t", "mangle", "-S"))
        found += [f"{program} {line}" for line in text.splitlines() if "FREEFLOW-" in line]
    return found


def doctor(host, codes=(0,)):
    process = subprocess.run(host.command("doctor", "-o", "json"), capture_output=True, text=True, timeout=60)
    need(process.returncode in codes, f"doctor: {process.returncode}: {process.stdout}{process.stderr}")
    checks = json.loads(process.stdout)
    return next(check for check in checks if check["name"] == "wire guard")


def dropped(host):
    """Packets that the guard has counted, of both families."""
    detail = doctor(host)["detail"]
    need(detail.startswith("in force: "), f"no guard is in force: {detail}")
    return sum(int(part.rsplit(", ", 1)[1].split()[0]) for part in detail.removeprefix("in force: ").split("; "))


def received(host):
    """Datagrams at the router's port that it made nothing of."""
    status = host.wire()
    return sum(status["counters"].get(name, 0) + status["drops"].get(name, 0) for name in REFUSALS)


def send(host, who, how, destination, port=ROCE_PORT):
    output = harness.run(host.enter(*who, *INSIDE, "send", how, destination, port, COUNT)).split()
    return int(output[1]), int(output[3])


@contextlib.contextmanager
def hearing(command, address, *ports):
    running = Running(command(*INSIDE, "hear", address, *ports))
    try:
        running.wait_for_output("ready")
        yield running
    finally:
        running.kill()


def refused(lab, sender, who, how, target, destination):
    """To the RoCE port it is refused and counted; to another port the same arrives."""
    drops, before = received(target), dropped(sender)
    with hearing(target.enter, destination, OTHER_PORT) as heard:
        sent, denied = send(sender, who, how, destination)
        need((sent, denied) == (0, COUNT), f"{sent} sent, {denied} refused")
        control, _ = send(sender, who, how, destination, OTHER_PORT)
        need(control == COUNT, f"to another port {control} of {COUNT} were sent")
        # The later ones have come, so the former would have.
        heard.wait_for_output(f"port {OTHER_PORT}")
    need(received(target) == drops, "the router has counted packets that it should not have seen")
    count = dropped(sender) - before
    need(count >= COUNT, f"{count} of {COUNT} counted by the guard")
    return f"{count} counted"


def own_mark(lab, host):
    """The mark is for those who have the network's privileges, also of users who are root in a namespace of their own."""
    for who in (NOBODY, CAPLESS_ROOT, [*NOBODY[:-1], "unshare", "--user", "--map-root-user"]):
        process = subprocess.run(host.enter(*who, *INSIDE, "send", "marked", address_of(lab.host(1)), ROCE_PORT, 1),
                                 capture_output=True, text=True, timeout=60)
        need(process.returncode != 0 and "PermissionError" in process.stderr, f"{who[0]}: {process.stdout}{process.stderr}")
    sent, denied = send(host, [], "marked", address_of(lab.host(1)))
    need((sent, denied) == (COUNT, 0), f"root of the host: {sent} sent, {denied} refused")


def spoofed_ipv6(lab, host):
    """A user's socket may be bound to any IPv6 address, and the packet then comes from there."""
    harness.run(host.enter("ip", "-6", "address", "replace", "fd00:99::1/64", "dev", "lo"))
    with hearing(host.enter, "::", ROCE_PORT, OTHER_PORT) as heard:
        need(send(host, NOBODY, "from=fd00:77::1", "fd00:99::1") == (0, COUNT), "it was sent")
        need(send(host, NOBODY, "from=fd00:77::1", "fd00:99::1", OTHER_PORT) == (COUNT, 0), "the other port is refused, too")
        heard.wait_for_output(f"port {OTHER_PORT}")
        need(f"port {ROCE_PORT}" not in heard.output(), heard.output())
    harness.run(host.enter("ip", "-6", "address", "delete", "fd00:99::1/64", "dev", "lo"))


def translated(lab, sender, target):
    """A container of another engine, behind the host's address. Its packets would come from the host itself."""
    namespace = f"ffg{os.getpid()}"
    harness.run(["ip", "netns", "add", namespace])
    try:
        shell = f"""set -e
            ip link add ffguest type veth peer name eth0 netns {namespace}
            ip address add 10.9.8.1/24 dev ffguest; ip link set ffguest up
            iptables -w -t nat -A POSTROUTING -s 10.9.8.0/24 ! -o ffguest -j MASQUERADE
            echo 1 > /proc/sys/net/ipv4/ip_forward"""
        # The name of a namespace is one of this machine's, and `lab enter` changes no more than the network.
        harness.run(sender.enter("sh", "-c", shell))
        for words in ("link set lo up", "address add 10.9.8.2/24 dev eth0", "link set eth0 up",
                      "route add default via 10.9.8.1"):
            harness.run(["ip", "-n", namespace, *words.split()])
        drops, before = received(target), dropped(sender)
        with hearing(target.enter, address_of(target), OTHER_PORT) as heard:
            for port in (ROCE_PORT, OTHER_PORT):
                harness.run(["ip", "netns", "exec", namespace, *INSIDE, "send", "plain", address_of(target), str(port), str(COUNT)])
            heard.wait_for_output(f"port {OTHER_PORT}")
        need(received(target) == drops, "they came through")
        count = dropped(sender) - before
        need(count >= COUNT, f"{count} of {COUNT} counted by the guard")
        return f"{count} counted"
    finally:
        harness.run(sender.enter("sh", "-c", "ip link delete ffguest; iptables -w -t nat -F POSTROUTING"))
        harness.run(["ip", "netns", "delete", namespace])


def legitimate(lab, server, client):
    harness.in_two_containers(server, client, ["ib_write_bw", "-n", "200"], ["ib_write_bw", "-n", "200", "{ip}"])


def put_once(lab, host):
    """`up` again changes nothing, and brings back what somebody has taken away or put before it."""
    whole, count = guards(host), dropped(host)
    need(len(whole) >= 8, f"the guard is not whole: {whole}")
    host.freeflow("up")
    need(guards(host) == whole and dropped(host) == count, "a second `up` has changed the guard")
    jump = next(line for line in whole if line.startswith("iptables -A POSTROUTING")).split()[2:]
    for broken in (["-D", *jump], ["-I", "POSTROUTING", "1", "-p", "udp", "-j", "ACCEPT"]):
        harness.run(host.enter("iptables", "-w", "-t", "mangle", *broken))
        verdict = doctor(host, codes=(1,))
        need(verdict["verdict"] == "missing" and "up" in verdict["remedy"], f"doctor says: {verdict}")
        host.freeflow("up")
        need(doctor(host)["verdict"] == "ok", "`up` has not brought the guard back")
        need(send(host, NOBODY, "plain", address_of(lab.host(1))) == (0, COUNT), "it does not hold")
    harness.run(host.enter("iptables", "-w", "-t", "mangle", "-D", "POSTROUTING", "-p", "udp", "-j", "ACCEPT"))


def no_guard_no_wire(lab, host):
    """Where nothing can guard the port, a host with peers does not come up, and says why."""
    host.freeflow("down", "--force")
    need(guards(host) == [], f"`down` has left {guards(host)}")
    hide = "for p in xtables-nft-multi xtables-legacy-multi nft; do [ ! -e /usr/sbin/$p ] || mount --bind /bin/false /usr/sbin/$p; done"
    command = " ".join(map(str, host.command("up", "--peers", host.run_dir / "peers.json", "--range", "10.111.2.0/24")))
    process = subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{hide}; exec {command}"],
                             capture_output=True, text=True, timeout=60)
    need(process.returncode == 1, f"exit status {process.returncode}: {process.stdout}{process.stderr}")
    need(f"UDP {ROCE_PORT}" in process.stderr and "nftables" in process.stderr, process.stderr)
    need(not (host.run_dir / "admin.sock").exists(), "a router was started")
    host.freeflow("up", "--peers", host.run_dir / "peers.json", "--range", "10.111.2.0/24")
    need(doctor(host)["verdict"] == "ok", "there is no guard")


@pytest.fixture(scope="module")
def pair(lab):
    harness.require_commands("setpriv", "iptables", "ib_write_bw")
    return lab.pair()


@pytest.fixture(scope="module")
def one(lab, pair):
    return lab.host(1)


@pytest.fixture(scope="module")
def two(lab, pair):
    return lab.host(2)


@pytest.mark.parametrize("how", ["plain", "connected", "large", "segmented"])
@pytest.mark.parametrize("who", [NOBODY, CAPLESS_ROOT], ids=["a user", "root without capabilities"])
def test_datagrams_from_the_network_of_a_host_are_dropped(lab, one, two, who, how):
    refused(lab, two, who, how, one, address_of(one))


def test_user_does_not_reach_the_own_router(lab, one):
    refused(lab, one, NOBODY, "plain", one, address_of(one))


def test_user_with_a_made_up_ipv6_address(lab, two):
    spoofed_ipv6(lab, two)


def test_mark_takes_privileges(lab, two):
    own_mark(lab, two)


def test_container_behind_address_translation(lab, one, two):
    translated(lab, two, one)


def test_pair_of_containers_is_not_concerned(lab, server, client):
    legitimate(lab, server, client)


def test_up_again_puts_the_guard_once(lab, two):
    put_once(lab, two)


def test_no_guard_no_wire(lab, two):
    no_guard_no_wire(lab, two)
