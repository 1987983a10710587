#!/usr/bin/env python3
"""RDMA between two hosts of a lab: perftest, ibverbs-utils and the tests' own programs, each end on another host.

The programs are those of the stages for one host; here every byte goes through packets. The wide lab's MTU carries
packets of 4096 bytes, the narrow one's is what Ethernet has.
"""

import time

import perftest
import pingpong
import differential
import lib
import statuses
from lib import need

WIDE_MTU = 4200
NARROW_MTU = 1500


def transports(verb):
    """Each transport with the sizes that cross packets' ends; None stands for the tool's own."""
    sizes = {"RC": (None, "1", "4097"), "XRC": (None, "65537"), "UC": (None, "12289"), "UD": (None, "1", "1001")}
    names = {"send": ("RC", "UC", "UD", "XRC"), "write": ("RC", "UC", "XRC")}.get(verb, ("RC", "XRC"))
    for name in names:
        yield name, (None,) if verb == "atomic" else sizes[name]


def little(verb, transport):
    """UC has no flow control: what is more than the router's receive buffer holds (16 MiB) is lost while that router has no
    processor, and the receiver of SENDs waits for ever. Four times the tool's own size would be more."""
    return ["-s", "12289"] if (verb, transport) == ("send", "UC") else []


def matrix():
    """A selection of tests/perftest.py's rows: each tool with each transport, polled and evented, odd sizes, and more."""
    for verb in ("send", "write", "read", "atomic"):
        for transport, sizes in transports(verb):
            for kind in ("bw", "lat"):
                base = [f"ib_{verb}_{kind}", "-c", transport, "-F", "-n", "200"]
                for size in sizes if kind == "bw" else sizes[:1]:
                    yield base + (["-s", size] if size else [])
                if verb != "write":
                    yield base + ["-e"]
                if kind == "bw":
                    yield base + ["-q", "4"] + little(verb, transport)
                    yield base + ["-b"]
    for words in OTHERS:
        yield words.split()


def patient(words):
    """With a timeout of a second: the other host's router may have no processor for longer than perftest's own."""
    return words if {"-R", "UD", "UC"} & set(words) else [*words, "-u", "18"]


OTHERS = [
    "ib_send_lat -F -n 200 -I 64",
    "ib_send_bw -F -n 200 -I 64 -s 64",
    "ib_write_lat -F -n 200 -I 64",
    "ib_write_bw -c UC -F -n 200 -I 64 -s 64",
    "ib_send_lat -c UD -F -n 200 -I 64",
    "ib_send_bw -F -s 1048577 -n 20",
    "ib_read_bw -F -s 1000003 -n 20",
    "ib_write_bw -F -a -n 5",
    "ib_write_bw -F -s 8388608 -n 10",
    "ib_read_bw -F -o 1 -n 100",
    "ib_send_bw -F -r 4 -t 4 -n 500",
    "ib_send_bw -F -n 200 --use-srq -q 4",
    "ib_send_lat -c XRC -F -n 200 --use-srq -e",
    "ib_atomic_bw -A CMP_AND_SWAP -F -n 200",
    "ib_send_bw -F -n 256 -l 8 --use_old_post_send",
    "ib_write_bw -F -D 2 -q 2",
    "ib_write_bw -F -n 200 --odp",
    "ib_send_bw -R -F -n 200",
    "ib_send_lat -R -F -n 200 -e",
    "ib_write_bw -R -F -n 200 -q 4",
    "ib_read_bw -R -F -n 200 -z",
    "ib_atomic_lat -R -F -n 200",
    "ib_send_bw -R -c UD -F -n 200",
    "ib_send_lat -R -c UD -F -n 200 -T 96",
]
TO_GROUP = f"ib_send_bw -c UD -F -n 200 -g -M {perftest.GROUP}"
# Path MTU 1024 is what fits into Ethernet's frames.
NARROW = [
    "ib_send_bw -F -n 200 -m 1024 -s 65537",
    "ib_send_lat -F -n 100 -m 1024 -s 1025 -e",
    "ib_write_bw -F -n 200 -m 1024 -b",
    "ib_write_bw -c UC -F -n 200 -m 1024",
    "ib_read_bw -F -n 200 -m 1024 -s 10001",
    "ib_write_bw -F -n 200 -m 256 -s 20000",
    "ib_read_lat -F -n 100 -m 512 -s 4000",
    "ib_send_bw -c UD -F -n 200 -m 1024",
    "ib_send_bw -c XRC -F -n 200 -m 1024",
    "ib_atomic_lat -F -n 100 -m 1024",
]


def pingpong_rows():
    for kind in ("rc", "uc", "ud", "srq"):
        for options in ([], ["-e"]):
            yield [f"ibv_{kind}_pingpong", "-g", "0", "-n", "500", *options]
    for options in (["-s", "1048576", "-n", "50", "-m", "4096"], ["-N", "-t", "-n", "300"], ["-o", "-n", "300"]):
        yield ["ibv_rc_pingpong", "-g", "0", *options]
    for options in ([], ["-e"]):
        yield ["ibv_xsrq_pingpong", "-g", "0", "-n", "500", *options]


def model(server, client, *options):
    """Random requests both ways against a model of the memory."""
    wire = lib.program("wire")
    _, output = lib.in_two_containers(server, client, [wire, *options, "server", lib.PORT],
                                      [wire, *options, "client", "{ip}", lib.PORT])
    need("all right" in output, output)
    return output.strip().splitlines()[-1]


def went_through_packets(host):
    """Else this stage would show nothing."""
    status = host.wire()
    need(status["counters"].get("packets_sent", 0) > 10000 and status["counters"].get("packets_received", 0) > 10000,
         f"the wire carried next to nothing: {status['counters']}")
    need("bad_icrc" not in status["counters"] and "malformed" not in status["drops"],
         f"routers do not understand each other: {status['counters']}, {status['drops']}")


def to_group(server, client, directory):
    """The server's host has a member already, which takes nothing: its router hears of members a little later than of TCP."""
    resident = server.host.container("resident")
    member = resident.start(lib.program("tenants"), "stay", "239.1.2.3")  # the same by its address
    member.wait_for_output("ready")
    time.sleep(1)
    found = perftest.one(server, client, TO_GROUP.split(), directory)
    need(member.process.poll() is None, f"the resident member ended:\n{member.output()}")
    resident.remove()
    return found


def narrow(checks):
    with lib.Lab(2, NARROW_MTU) as lab:
        server, client = lab.pair()
        for words in NARROW:
            checks.check(f"MTU {NARROW_MTU}: {words}", perftest.one, server, client, patient(words.split()), lab.directory)
        checks.check(f"MTU {NARROW_MTU}: random requests, path MTU 1024", model, server, client, "-m", "1024")
        checks.check(f"MTU {NARROW_MTU}: random requests, path MTU 256", model, server, client, "-m", "256", "-q", "2")
        checks.check(f"MTU {NARROW_MTU}: packets carried it", went_through_packets, lab.host(1))


def test(checks):
    lib.require_commands("ib_send_bw", "ib_atomic_lat", "ibv_rc_pingpong")
    program = lib.program("statuses")
    with lib.Lab(2, WIDE_MTU) as lab:
        server, client = lab.pair()
        lab.wait_for_peers()
        before = [lib.router_resources(host) for host in lab.hosts]
        checks.check("random requests", model, server, client)
        checks.check("random requests, one queue pair", model, server, client, "-q", "1", "-s", "7")
        for words in matrix():
            checks.check(" ".join(words), perftest.one, server, client, patient(words), lab.directory)
        checks.check(TO_GROUP, to_group, server, client, lab.directory)
        for words in pingpong_rows():
            checks.check(" ".join(words), pingpong.unhurried(pingpong.run_pair), lab.host(1), words, lab.host(2))
        checks.check("statuses between two hosts", statuses.two_containers, server, client, program)
        differential.compare_over_wire(checks, lab)
        checks.check("packets carried it", went_through_packets, lab.host(1))
        for host, held in zip(lab.hosts, before):
            checks.check(f"nothing is left in router {host.number}", lib.wait_for_resources, host, held)
    narrow(checks)


if __name__ == "__main__":
    lib.main(test)
