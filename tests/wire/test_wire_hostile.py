"""Enemies between hosts: forged packets, guessed numbers, other people's addresses. A pair at work must not notice.

The victim's peer reads a part of the victim's memory again and again and compares it; what an enemy writes, it writes
there. Packets are forged by root in a host's own network too: what a host may do at worst to another's tenants.
"""

import pytest

import harness
from harness import PORT, Lab, forgery, need

MTU = 4200
# Where tests/programs/traffic.c keeps the bytes that never change.
CONSTANT_AT = 16 * 16 * 1024 + 48 * 4 * 1024
QKEY, WRONG_QKEY = 0x11111111, 0x22222222

# Packets to send, their sender (a host's number, or a stranger's), and the counters of the victim's
# router that together report them; none for a packet that the QP itself has to handle.
FORGERIES = [
    ("write", forgery.STRANGER, ["unknown_source"]),
    ("datagram", forgery.STRANGER, ["unknown_source"]),
    ("write", 3, ["wrong_source"]),
    ("acknowledge", 3, ["wrong_source"]),
    ("unreliable", 3, ["wrong_service"]),
    ("unreliable", 2, ["wrong_service"]),
    ("datagram", 2, ["wrong_service"]),
    ("unknown-opcode", 2, ["malformed"]),
    ("short-header", 2, ["malformed"]),
    ("pkey", 2, ["wrong_pkey"]),
    ("bad-icrc", 2, ["bad_icrc"]),
    ("noise", 2, ["bad_icrc", "malformed", "truncated", "unknown_key", "unknown_qpn", "wrong_pkey"]),
    ("acknowledge", 2, []),
    ("write", 2, []),  # with guessed PSNs
]


def forged(lab, victim, kind, source, names):
    """By root in the network of a host."""
    sender = lab.host(source if source in (2, 3) else 3)
    source = source if source == forgery.STRANGER else forgery.address_of(sender)
    before = forgery.refusals(lab.host(1))
    harness.run(sender.enter(*forgery.FORGE, kind, source, forgery.address_of(lab.host(1)), victim.qpn, victim.rkey, victim.address, forgery.COUNT))
    note = forgery.counted(lab.host(1), names, before, forgery.COUNT) if names else ""
    victim.need_alive()
    return note


def guessed_qpns(lab, victim):
    before = forgery.refusals(lab.host(1))
    for guess in range(5):
        qpn = (victim.qpn + 1 + guess * 7919) % (1 << 24)
        harness.run(lab.host(2).enter(*forgery.FORGE, "write", forgery.address_of(lab.host(2)), forgery.address_of(lab.host(1)), qpn, victim.rkey,
                                  victim.address, forgery.COUNT))
    return forgery.counted(lab.host(1), ["unknown_qpn"], before, 4 * forgery.COUNT)


def dropped(host):
    return host.lab.status()["hosts"][host.number - 1]["dropped"]


def from_container(lab, victim, container, destination):
    """The same packet out of a container never leaves its host, whatever source it names."""
    before, peer = dropped(container.host), forgery.refusals(lab.host(1))
    container.exec(*forgery.FORGE, "write", forgery.address_of(lab.host(2)), destination, victim.qpn, victim.rkey, victim.address, forgery.COUNT)
    count = dropped(container.host) - before
    need(count >= forgery.COUNT, f"{count} of {forgery.COUNT} dropped by the guard")
    now = forgery.refusals(lab.host(1))
    for name in ("unknown_source", "wrong_source"):
        need(now.get(name, 0) == peer.get(name, 0), f"{name} grew: a packet came through")
    victim.need_alive()
    return f"{count} dropped"


def by_verbs(victim, enemy, target, other):
    """Queue pairs that name the victim's without being connected back, under its address and another's."""
    program = harness.program("wire_hostile")
    output = enemy.exec(program, "attack", victim.qpn, victim.rkey, victim.address, target.ip, other.ip)
    need("\n0 failed" in output, output)
    victim.need_alive()
    return f"{len(output.splitlines()) - 1} attempts"


def others_key(victim, enemy, accomplice):
    """A good connection to the victim's host opens nothing of the victim's."""
    program = harness.program("wire_hostile")
    harness.in_two_containers(accomplice, enemy, [program, "keys", "server", PORT],
                          [program, "keys", "client", "{ip}", PORT, victim.rkey, victim.address])
    victim.need_alive()


def datagrams(lab, receiver, sender):
    """A UD queue pair sees nothing but what is meant for it: not a wrong Q_Key, nor a sender that does not exist."""
    program = harness.program("wire_hostile")
    running = receiver.start(program, "receive")
    qpn = running.wait_for_output("ready").split()[1]
    before = forgery.refusals(lab.host(1))
    sender.exec(program, "send", receiver.ip, qpn, WRONG_QKEY)
    forgery.counted(lab.host(1), ["wrong_qkey"], before, 1)
    before = forgery.refusals(lab.host(1))
    harness.run(lab.host(2).enter(*forgery.FORGE, "datagram", forgery.address_of(lab.host(2)), forgery.address_of(lab.host(1)), qpn, 0x123456, 0, forgery.COUNT))
    note = forgery.counted(lab.host(1), ["wrong_network"], before, forgery.COUNT)
    # Under the GID of another container of that host there is no such QPN: it does not even leave.
    sender.exec(program, "send", f"{receiver.ip.rsplit('.', 1)[0]}.1", qpn, QKEY)
    sender.exec(program, "send", receiver.ip, qpn, QKEY)
    code = running.wait(20)
    need(code == 0, f"it got another message ({code}):\n{running.output()}")
    return note


@pytest.fixture(scope="module")
def lab():
    with Lab(3, MTU) as lab:
        yield lab


@pytest.fixture(scope="module")
def pair(lab):
    return lab.pair()


@pytest.fixture(scope="module")
def enemies(lab, pair):
    """One beside the victim's peer, whose host the victim's router listens to; one elsewhere; one at home."""
    return {name: lab.host(number).container(name) for name, number in (("near", 2), ("far", 3), ("home", 1))}


@pytest.fixture(scope="module")
def victim(pair, enemies):
    return forgery.Victim(*pair, CONSTANT_AT)


@pytest.mark.parametrize("kind, source, names", FORGERIES, ids=[
    f"{kind} from {'a strange address' if source == forgery.STRANGER else f'host {source}'}"
    for kind, source, _ in FORGERIES])
def test_forged_by_root(lab, victim, kind, source, names):
    forged(lab, victim, kind, source, names)


def test_guessed_qpns_forged_by_root(lab, victim):
    guessed_qpns(lab, victim)


@pytest.mark.parametrize("enemy", ["near", "far", "home"])
@pytest.mark.parametrize("target", ["host", "victim"])
def test_forged_in_a_container(lab, server, victim, enemies, enemy, target):
    from_container(lab, victim, enemies[enemy], forgery.address_of(lab.host(1)) if target == "host" else server.ip)


@pytest.mark.parametrize("enemy", ["near", "far", "home"])
def test_guesses_by_verbs(server, victim, enemies, enemy):
    by_verbs(victim, enemies[enemy], server, enemies["home"])


@pytest.mark.parametrize("enemy", ["near", "far"])
def test_key_of_the_victim_is_refused(victim, enemies, enemy):
    others_key(victim, enemies[enemy], enemies["home"])


def test_datagrams(lab, victim, enemies):
    datagrams(lab, enemies["home"], enemies["near"])


def test_memory_and_queue_pair_of_the_victim_are_as_they_were(victim):
    victim.stop()
