#!/usr/bin/env python3
"""Enemies between hosts: forged packets, guessed numbers, other people's addresses. A pair at work must not notice.

The victim's peer reads a part of the victim's memory again and again and compares it; what an enemy writes, it writes
there. Packets are forged by root in a host's own network too: what a host may do at worst to another's tenants.
"""

import pathlib
import sys
import time

import lib
from lib import need

MTU = 4200
FORGE = [sys.executable, str(pathlib.Path(__file__).with_name("wire_forge.py"))]
COUNT = 20
# Where tests/c/traffic.c keeps the bytes that never change.
CONSTANT_AT = 16 * 16 * 1024 + 48 * 4 * 1024
STRANGER = "192.168.240.99"
COUNTED_SECONDS = 10
QKEY, WRONG_QKEY = 0x11111111, 0x22222222

# What is sent, from whose address (a host's number, or a stranger's), and which counters of the victim's router together
# say so; none where the packet is one that a QP itself has to bear.
FORGERIES = [
    ("write", STRANGER, ["unknown_source"]),
    ("datagram", STRANGER, ["unknown_source"]),
    ("write", 3, ["wrong_source"]),
    ("acknowledge", 3, ["wrong_source"]),
    ("unreliable", 3, ["wrong_service"]),
    ("unreliable", 2, ["wrong_service"]),
    ("datagram", 2, ["wrong_service"]),
    ("unknown-opcode", 2, ["malformed"]),
    ("short-header", 2, ["malformed"]),
    ("pkey", 2, ["wrong_pkey"]),
    ("bad-icrc", 2, ["bad_icrc"]),
    ("noise", 2, ["bad_icrc", "malformed", "truncated", "unknown_qpn", "wrong_pkey"]),
    ("acknowledge", 2, []),
    ("write", 2, []),  # with guessed PSNs
]


class Victim:
    """A pair at work between two hosts."""

    def __init__(self, server, client):
        load = lib.program("load")
        self.there = server.start(load, "server", lib.PORT)
        server.wait_for_port(self.there)
        self.here = client.start(load, "-e", "client", server.ip, lib.PORT)
        self.qpn, self.rkey, address = (int(word) for word in self.there.wait_for_output("ready").split()[1:4])
        self.address = address + CONSTANT_AT

    def stop(self):
        self.here.terminate()
        for side in (self.here, self.there):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"it was disturbed ({code}):\n{side.output()}")
        return self.here.output().strip().splitlines()[-1]

    def need_alive(self):
        for side in (self.here, self.there):
            need(side.process.poll() is None, f"it was disturbed:\n{side.output()}")


def refusals(host):
    status = host.wire()
    counts = dict(status["counters"])
    for name, count in status["drops"].items():
        counts[name] = counts.get(name, 0) + count
    return counts


def counted(host, names, before, least):
    """Until the router has counted as many as were sent."""
    end = time.monotonic() + COUNTED_SECONDS
    while True:
        now = refusals(host)
        count = sum(now.get(name, 0) - before.get(name, 0) for name in names)
        if count >= least:
            return f"{count} counted"
        more = {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}
        need(time.monotonic() < end, f"{count} of {least} counted as {' or '.join(names)}: {more}")
        time.sleep(0.02)


def address_of(host):
    return f"192.168.240.{host.number}"


def forged(lab, victim, kind, source, names):
    """By root in the network of a host."""
    sender = lab.host(source if source in (2, 3) else 3)
    source = source if source == STRANGER else address_of(sender)
    before = refusals(lab.host(1))
    lib.run(sender.enter(*FORGE, kind, source, address_of(lab.host(1)), victim.qpn, victim.rkey, victim.address, COUNT))
    note = counted(lab.host(1), names, before, COUNT) if names else ""
    victim.need_alive()
    return note


def guessed_qpns(lab, victim):
    before = refusals(lab.host(1))
    for guess in range(5):
        qpn = (victim.qpn + 1 + guess * 7919) % (1 << 24)
        lib.run(lab.host(2).enter(*FORGE, "write", address_of(lab.host(2)), address_of(lab.host(1)), qpn, victim.rkey,
                                  victim.address, COUNT))
    return counted(lab.host(1), ["unknown_qpn"], before, 4 * COUNT)


def dropped(host):
    return host.lab.status()["hosts"][host.number - 1]["dropped"]


def from_container(lab, victim, container, destination):
    """The same packet out of a container never leaves its host, whatever source it names."""
    before, peer = dropped(container.host), refusals(lab.host(1))
    container.exec(*FORGE, "write", address_of(lab.host(2)), destination, victim.qpn, victim.rkey, victim.address, COUNT)
    count = dropped(container.host) - before
    need(count >= COUNT, f"{count} of {COUNT} dropped by the guard")
    now = refusals(lab.host(1))
    for name in ("unknown_source", "wrong_source"):
        need(now.get(name, 0) == peer.get(name, 0), f"{name} grew: a packet came through")
    victim.need_alive()
    return f"{count} dropped"


def by_verbs(victim, enemy, target, other):
    """Queue pairs that name the victim's without being connected back, under its address and another's."""
    program = lib.program("wire_hostile")
    output = enemy.exec(program, "attack", victim.qpn, victim.rkey, victim.address, target.ip, other.ip)
    need("\n0 failed" in output, output)
    victim.need_alive()
    return f"{len(output.splitlines()) - 1} attempts"


def others_key(victim, enemy, accomplice):
    """A good connection to the victim's host opens nothing of the victim's."""
    program = lib.program("wire_hostile")
    lib.in_two_containers(accomplice, enemy, [program, "keys", "server", lib.PORT],
                          [program, "keys", "client", "{ip}", lib.PORT, victim.rkey, victim.address])
    victim.need_alive()


def datagrams(lab, receiver, sender):
    """A UD queue pair sees nothing but what is meant for it: not a wrong Q_Key, nor a sender that does not exist."""
    program = lib.program("wire_hostile")
    running = receiver.start(program, "receive")
    qpn = running.wait_for_output("ready").split()[1]
    before = refusals(lab.host(1))
    sender.exec(program, "send", receiver.ip, qpn, WRONG_QKEY)
    counted(lab.host(1), ["wrong_qkey"], before, 1)
    before = refusals(lab.host(1))
    lib.run(lab.host(2).enter(*FORGE, "datagram", address_of(lab.host(2)), address_of(lab.host(1)), qpn, 0x123456, 0, COUNT))
    note = counted(lab.host(1), ["wrong_network"], before, COUNT)
    # Under the GID of another container of that host there is no such QPN: it does not even leave.
    sender.exec(program, "send", f"{receiver.ip.rsplit('.', 1)[0]}.1", qpn, QKEY)
    sender.exec(program, "send", receiver.ip, qpn, QKEY)
    code = running.wait(20)
    need(code == 0, f"it got another message ({code}):\n{running.output()}")
    return note


def test(checks):
    with lib.Lab(3, MTU) as lab:
        server, client = lab.pair()
        # One enemy beside the victim's peer, whose host the victim's router listens to; one elsewhere; one at home.
        near, far, home = lab.host(2).container("near"), lab.host(3).container("far"), lab.host(1).container("home")
        victim = Victim(server, client)
        for kind, source, names in FORGERIES:
            whose = "a stranger's address" if source == STRANGER else f"host {source}"
            checks.check(f"forged by root: {kind} from {whose}", forged, lab, victim, kind, source, names)
        checks.check("forged by root: guessed QPNs from the peer's host", guessed_qpns, lab, victim)
        for enemy in (near, far, home):
            checks.check(f"forged in container {enemy.name}, to the host", from_container, lab, victim, enemy,
                         address_of(lab.host(1)))
            checks.check(f"forged in container {enemy.name}, to the victim", from_container, lab, victim, enemy, server.ip)
        for enemy in (near, far, home):
            checks.check(f"by verbs: container {enemy.name}", by_verbs, victim, enemy, server, home)
        for enemy in (near, far):
            checks.check(f"by verbs: container {enemy.name} uses the victim's key", others_key, victim, enemy, home)
        checks.check("datagrams", datagrams, lab, home, near)
        checks.check("the victim's memory and queue pair are as they were", victim.stop)


if __name__ == "__main__":
    lib.main(test)
