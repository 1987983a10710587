"""A container and a machine that never heard of FreeFlow: Linux's Soft-RoCE (rxe) in an emulated guest.

perftest and ibverbs-utils, unmodified, one end in a container and the other in the guest, both ways round, at path MTUs of 1024
and 4096, polled and evented; and every kind of message compared byte by byte. Without --full, of each kind of row one MTU
one way and the other MTU the other way (of what only varies a kind, one of the four); with it (`make test-interop`) all. What goes over the wire is
captured, and the ICRC of each packet of either side computed again.

All of it is in a network namespace of this test's own. The guest is emulated and slow beside spinners: so the router
sleeps when idle (lowcpu), and QPs have long timeouts (-u 18: one second).
"""

import contextlib
import itertools
import json
import re
import time

import pytest

import harness
from harness import Host, external, need, pingpong, roce, rxe_guest
from harness.external import GUEST, GUEST6, HOST, HOST6, STRANGER, Ends, full, gid_index, peers_file
from harness.settings import FULL, PROGRAMS

SECONDS = 1500
ROW_SECONDS, CONTENTS_SECONDS = 45, 90
PERFTEST_ROW = re.compile(r"^ *\d+ +\d+ +\d+\.\d+ +\d+\.\d+", re.MULTILINE)
TIMEOUT = ["-u", "18"]


def perftest_rows():
    """Kinds of rows: program and switches, without what all have."""
    for transport, kind, events in itertools.product(("RC", "UC", "UD"), ("bw", "lat"), ([], ["-e"])):
        # UC has no flow control: what is more than the guest's queues hold is lost, and the receiver waits for ever.
        little = ["-s", "8192"] if (transport, kind) == ("UC", "bw") else []
        yield [f"ib_send_{kind}", "-c", transport, *events, *little]
    for transport, kind in itertools.product(("RC", "UC"), ("bw", "lat")):
        yield [f"ib_write_{kind}", "-c", transport]  # perftest itself refuses -e
    for verb, kind, events in itertools.product(("read", "atomic"), ("bw", "lat"), ([], ["-e"])):
        yield [f"ib_{verb}_{kind}", *events]
    yield ["ib_atomic_bw", "-A", "CMP_AND_SWAP"]
    yield ["ib_atomic_lat", "-A", "CMP_AND_SWAP"]


def further_rows():
    # Messages of several packets, the last one not whole and not a multiple of 4.
    for program in ("ib_send_lat", "ib_write_lat", "ib_read_lat"):
        yield [program, "-s", "10001"]
    yield ["ib_send_lat", "-I", "64", "-s", "33"]
    yield ["ib_write_bw", "-q", "4", "-s", "8192"]
    yield ["ib_read_bw", "-q", "4", "-s", "8192"]
    yield ["ib_send_bw", "--use-srq", "-q", "2", "-s", "8192"]
    for program in ("ib_send_bw", "ib_write_bw", "ib_read_bw"):
        yield [program, "-b", "-s", "16384"]
    yield ["ibv_rc_pingpong", "-n", "50", "-s", "100003"]


def pingpong_rows():
    for kind, options in itertools.product(("rc", "uc", "ud", "srq"), ([], ["-e"])):
        yield [f"ibv_{kind}_pingpong", "-n", "200", *options]


def rows(everything):
    """Each with its path MTU, and whether the container is the server."""
    corners = list(itertools.product((1024, 4096), (True, False)))
    found = []
    for number, words in enumerate([*perftest_rows(), *pingpong_rows()]):
        # Crosswise: one MTU one way, the other the other way, and the other two for the next kind.
        some = corners if everything else (corners[1:3], corners[::3])[number % 2]
        found += [(words, *corner) for corner in some]
    for number, words in enumerate(further_rows()):
        found += [(words, *corner) for corner in (corners if everything else [corners[number % 4]])]
    # The guest changes its MTU once.
    return sorted(found, key=lambda row: row[1])


@harness.steady
def run_perftest(ends, words, mtu, container_serves):
    ends.set_mtu(mtu)
    server, client = ends.order(container_serves)
    count = "100" if words[0].endswith("_lat") else "64" if "UC" in words else "200"
    base = [*words, "-F", "-n", count, *TIMEOUT]
    output = harness.in_two_containers(server, client, [*base, "-x", ends.index[server]],
                                   [*base, "-x", ends.index[client], "{ip}"], seconds=ROW_SECONDS)[1]
    found = PERFTEST_ROW.findall(output)
    need(found, f"no row of results:\n{output}")
    need(re.search(rf"Mtu +: {mtu}\[B\]", output), f"the path MTU is not {mtu}:\n{output}")
    return found[-1].strip()


@pingpong.unhurried
def run_pingpong(ends, words, mtu, container_serves):
    ends.set_mtu(mtu)
    server, client = ends.order(container_serves)
    path_mtu = [] if "ud" in words[0] else ["-m", mtu]
    # Messages of UD are one packet.
    size = [] if "-s" in words else ["-s", 1024 if "ud" in words[0] else 4096]
    base = [*words, *path_mtu, *size, "-g"]
    output = harness.in_two_containers(server, client, [*base, ends.index[server]], [*base, ends.index[client], "{ip}"],
                                   seconds=ROW_SECONDS)[1]
    need("iters in" in output, f"no result:\n{output}")
    return output.strip().splitlines()[-1]


def run_contents(ends, mtu, container_serves):
    ends.set_mtu(mtu)
    server, client = ends.order(container_serves)
    # -P: pyverbs.py beside it is not the module.
    words = ["/usr/bin/python3", "-P", PROGRAMS / "external_inside.py"]
    output = harness.in_two_containers(server, client, [*words, ends.index[server], mtu],
                                   [*words, ends.index[client], mtu, "{ip}"], seconds=CONTENTS_SECONDS)[1]
    need("OK" in output, output)


def under_faults(ends, host, container_serves):
    """The router's packets are lost, overtaken, repeated and spoiled on their way; those to it are not."""
    injected = lambda: sum(value for name, value in counters(host)["counters"].items() if name.startswith("injected"))
    before = injected()
    host.freeflow("wire", "faults", "--loss", "1%", "--duplicate", "1%", "--reorder", "1%", "--corrupt", "1%", "--seed", "7")
    try:
        run_contents(ends, 1024, container_serves)
    finally:
        count = injected() - before
        host.freeflow("wire", "faults", "off")
    need(count > 0, "no fault was injected")
    return f"{count} faults"


# ---- the wire


def counters(host):
    return json.loads(host.freeflow("wire", "status", "-o", "json"))


def captured(ends, words, mtu, container_serves, own=HOST, other=GUEST):
    """A row, and what a third party says of its packets."""
    with roce.Capture(rxe_guest.TAP) as capture:
        run = run_perftest if words[0].startswith("ib_") else run_pingpong
        run(ends, words, mtu, container_serves)
    sent = [packet for packet in capture.packets if packet.source == own and packet.destination == other]
    received = [packet for packet in capture.packets if packet.source == other and packet.destination == own]
    need(len(sent) + len(received) == len(capture.packets), "packets of others are on the wire")
    for side, packets in (("sent", sent), ("received", received)):
        need(packets, f"no packet was {side}")
        bad = [packet for packet in packets if not packet.icrc_is_good()]
        need(not bad, f"{len(bad)} of {len(packets)} packets {side} have a wrong ICRC, the first: "
             + (bad[0].bytes.hex() if bad else ""))
    return f"{len(sent)} packets sent, {len(received)} received"


def nothing_was_dropped(host, guest):
    """Neither side found a packet wrong in form; what a slow guest loses is another matter."""
    status = counters(host)
    drops = {name: value for name, value in status["counters"].items() if "icrc" in name and value}
    drops |= {name: value for name, value in status["drops"].items() if name == "malformed"}
    need(not drops, f"the router dropped packets of rxe: {drops}")
    text = guest.exec("sh", "-c", "grep . /sys/class/infiniband/rxe0/ports/1/hw_counters/* /dev/null")
    found = dict(re.findall(r"hw_counters/(\w+):(\d+)", text))
    return ", ".join(f"{name} {value}" for name, value in found.items() if value != "0" and "pkts" not in name)


# ---- who may


def table_of(container):
    text = container.exec("ibv_devinfo", "-v")
    return re.findall(r"GID\[ *(\d+)\]:\s+(\S+), RoCE v2", text)


def has_two_gids(container, own):
    table = table_of(container)
    need(table == [("0", f"::ffff:{container.ip}"), ("1", own)], f"the GID table is {table}")
    port = "/sys/class/infiniband/freeflow0/ports/1"
    index = container.exec("cat", f"{port}/gids/1").strip()
    address = own.removeprefix("::ffff:")
    need(index == full(f"::ffff:{address}" if "." in address else own), f"gids/1 is {index}")
    need(container.exec("cat", f"{port}/gid_attrs/types/1") == "RoCE v2\n", "gid_attrs/types/1")


def is_refused(ends, container, guest_index, container_index, word):
    """A pingpong that finds nobody, and of which no packet leaves the host."""
    server = ends.guest.start("ibv_rc_pingpong", "-g", guest_index)
    try:
        ends.guest.wait_for_port(server)
        with roce.Capture(rxe_guest.TAP) as capture:
            output = container.exec("ibv_rc_pingpong", "-n", "1", "-g", container_index, GUEST, seconds=ROW_SECONDS, codes=(1,))
        need(word in output, f"not '{word}' but:\n{output}")
        leaks = [packet for packet in capture.packets if packet.source == HOST]
        need(not leaks, f"{len(leaks)} packets left the host, such as {leaks[0].bytes.hex() if leaks else ''}")
    finally:
        server.kill()
        ends.guest.background.remove(server)


def stranger_is_dropped(ends):
    """A machine that is not listed speaks first: the router hears of nobody whom it knows."""
    before = counters(ends.host)["counters"].get("unknown_source", 0)
    server = ends.container.start("ibv_rc_pingpong", "-g", 1)
    client = None
    try:
        ends.container.wait_for_port(server)
        # rxe takes seven retries for endless ones.
        index = gid_index(ends.guest, f"::ffff:{STRANGER}")
        client = ends.guest.start("ibv_rc_pingpong", "-n", "1", "-g", index, ends.container.ip)
        end = time.monotonic() + ROW_SECONDS
        while counters(ends.host)["counters"].get("unknown_source", 0) < before + 3:
            need(client.code is None, f"it has ended:\n{client.output()}")
            need(time.monotonic() < end, "its packets are not counted")
            time.sleep(0.05)
        need(server.process.poll() is None, f"the server has ended:\n{server.output()}")
    finally:
        server.kill()
        ends.container.background.remove(server)
        if client:
            client.kill()
            ends.guest.background.remove(client)


@harness.steady
def among_containers(ends, other):
    """Programs that choose a GID by themselves still find each other by their virtual ones."""
    with roce.Capture(rxe_guest.TAP) as capture:
        output = harness.in_two_containers(ends.container, other, ["ib_send_bw", "-F", "-n", "100"],
                                       ["ib_send_bw", "-F", "-n", "100", "{ip}"])[1]
    need(PERFTEST_ROW.search(output) and not capture.packets, f"not by way of memory:\n{output}")


def without_policy(ends, container):
    need(table_of(container) == [("0", f"::ffff:{container.ip}")], f"the GID table is {table_of(container)}")
    # The guest finds that it was given no address.
    is_refused(ends, container, ends.index[ends.guest], 1, "Couldn't read/write remote address")


@pytest.fixture(scope="module")
def surroundings():
    harness.require_commands("ib_send_bw", "ibv_rc_pingpong", "unshare", "nsenter")
    addresses = [f"{GUEST}/24", f"{STRANGER}/24", f"{GUEST6}/64"]
    with external.surroundings(addresses, [f"{HOST}/24", f"{HOST6}/64"], SECONDS) as surroundings:
        yield surroundings


@pytest.fixture(scope="module")
def guest(surroundings):
    return surroundings[0]


@contextlib.contextmanager
def host_with(surroundings, address, allowed):
    """A host that has the guest as external peer."""
    policy = [{"network": "default", "allow": allowed}] if allowed else []
    with Host("--mode", "lowcpu", "--peers", peers_file(surroundings[1], address, policy)) as host:
        yield host


@pytest.fixture(scope="module")
def host(surroundings, guest):
    with host_with(surroundings, HOST, [f"{GUEST}/32"]) as host:
        yield host


@pytest.fixture(scope="module")
def ends(host, guest, container):
    guest.wait_until_up()
    return Ends(host, guest, container)


def way(container_serves):
    return "guest to container" if container_serves else "container to guest"


def test_second_gid(ends, container):
    has_two_gids(container, f"::ffff:{HOST}")


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("words, mtu, container_serves", [
    pytest.param(words, mtu, serves, id=f"{' '.join(words)}, MTU {mtu}, {way(serves)}")
    for words, mtu, serves in rows(FULL)])
def test_row(ends, words, mtu, container_serves):
    run = run_perftest if words[0].startswith("ib_") else run_pingpong
    run(ends, words, mtu, container_serves)


@pytest.mark.parametrize("container_serves", [True, False], ids=way)
@pytest.mark.parametrize("mtu", [1024, 4096])
def test_contents(ends, mtu, container_serves):
    run_contents(ends, mtu, container_serves)


@pytest.mark.parametrize("container_serves", [True, False], ids=way)
def test_contents_under_faults(ends, host, container_serves):
    under_faults(ends, host, container_serves)


@pytest.mark.parametrize("words", ["ib_write_bw", "ib_read_bw", "ib_send_lat -c UD", "ib_atomic_lat"])
def test_icrcs(ends, words):
    captured(ends, words.split(), 4096, True)


def test_no_packet_was_found_wrong(ends, host, guest):
    nothing_was_dropped(host, guest)


def test_address_that_is_not_listed(ends, container, guest):
    is_refused(ends, container, gid_index(guest, f"::ffff:{STRANGER}"), 1, "Failed status")


def test_virtual_gid_does_not_lead_out(ends, container, guest):
    is_refused(ends, container, ends.index[guest], 0, "Failed status")


def test_address_that_is_not_listed_speaks_first(ends):
    stranger_is_dropped(ends)


def test_containers_of_one_host(ends, host):
    among_containers(ends, host.container("two"))


def test_ipv6(check, surroundings, guest, ends):
    ends.host.close()
    with host_with(surroundings, HOST6, [f"{GUEST6}/128"]) as host:
        container = host.container("one")
        ends = Ends(host, guest, container, gid_index(guest, GUEST6))
        check("a second GID", has_two_gids, container, HOST6)
        for words, mtu, container_serves in ((["ib_send_bw"], 1024, True), (["ib_write_bw"], 4096, False),
                                             (["ibv_ud_pingpong", "-n", "200"], 4096, True),
                                             (["ib_read_lat", "-s", "10001"], 1024, False)):
            check(" ".join(words), captured, ends, words, mtu, container_serves, HOST6, GUEST6)


def test_without_policy(surroundings, guest, ends):
    ends.host.close()
    with host_with(surroundings, HOST, []) as host:
        container = host.container("one")
        without_policy(Ends(host, guest, container), container)
