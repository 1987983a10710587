"""RDMA between two hosts of a lab: perftest, ibverbs-utils and the tests' own programs, each end on another host.

The programs are those of the stages for one host; here every byte goes through packets. The lab's MTU carries packets
of 4096 bytes; test_wire_narrow.py has Ethernet's.
"""

import time

import pytest

import harness
from harness import cm, need, perftest, pingpong, roce, statuses, wire
from harness.cases import selected


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
    """A selection of tests/verbs/test_perftest.py's rows: each tool with each transport, polled and evented, odd sizes, and more."""
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


def pingpong_rows():
    for kind in ("rc", "uc", "ud", "srq"):
        for options in ([], ["-e"]):
            yield [f"ibv_{kind}_pingpong", "-g", "0", "-n", "500", *options]
    for options in (["-s", "1048576", "-n", "50", "-m", "4096"], ["-N", "-t", "-n", "300"], ["-o", "-n", "300"]):
        yield ["ibv_rc_pingpong", "-g", "0", *options]
    for options in ([], ["-e"]):
        yield ["ibv_xsrq_pingpong", "-g", "0", "-n", "500", *options]


def to_group(server, client, directory):
    """The server's host has a member already, which takes nothing: its router hears of members a little later than of TCP."""
    resident = server.host.container("resident")
    member = resident.start(harness.program("tenants"), "stay", "239.1.2.3")  # the same by its address
    member.wait_for_output("ready")
    time.sleep(1)
    found = perftest.one(server, client, TO_GROUP.split(), directory)
    need(member.process.poll() is None, f"the resident member ended:\n{member.output()}")
    resident.remove()
    return found


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands("ib_send_bw", "ib_atomic_lat", "ibv_rc_pingpong")


@pytest.fixture(scope="module")
def pair(lab):
    return lab.pair()


@pytest.fixture(scope="module")
def before(lab, pair):
    return [harness.router_resources(host) for host in lab.hosts]


@pytest.fixture(scope="module")
def in_two(request, server, client, before):
    return statuses.in_two(server, client, selected(request, test_statuses))


@pytest.mark.parametrize("options", ["", "-q 1 -s 7"], ids=["many queue pairs", "one queue pair"])
def test_random_requests(server, client, before, options):
    wire.model(server, client, *options.split())


@pytest.mark.parametrize("words", [" ".join(words) for words in matrix()])
def test_perftest(lab, server, client, before, words):
    perftest.one(server, client, wire.patient(words.split()), lab.directory)


def test_short_messages_share_frames(lab, server, client, before):
    """WRITEs that are posted together travel as records of one frame, which the dissector reads."""
    harness.require_commands("tshark")
    packets = lab.directory / "records.pcapng"
    capture = harness.Running(lab.host(1).command("capture", "-s", "60", "-w", packets))
    try:
        cm.wait_until(lambda: packets.exists() and packets.stat().st_size > 0, "the capture does not begin")
        words = ["ib_write_bw", "-F", "-s", "64", "-n", "6400", "-l", "16", "-Q", "16", "-t", "128"]
        perftest.one(server, client, wire.patient(words), lab.directory)
        capture.terminate()
        capture.wait(20)
    finally:
        capture.kill()
    dissector = harness.settings.ROOT / "packaging" / "wireshark" / "freeflow.lua"
    fields = ["freeflow.records", "freeflow.crc_good", "freeflow.record_length"]
    found = harness.run(["tshark", "-X", f"lua_script:{dissector}", "-r", packets, "-Y", "freeflow.records", "-T",
                            "fields", *(word for field in fields for word in ("-e", field))])
    frames = [line.split("\t") for line in found.splitlines() if line.count("\t") == 2]  # not tshark's warnings
    need(frames and all(good == "1" for _, good, _ in frames), f"no frame of records, or damaged ones:\n{found[:2000]}")
    need(all(lengths == ",".join(["64"] * int(count)) for count, _, lengths in frames), f"other messages:\n{found[:2000]}")


def stream_packets(lab):
    """Source, source port and length of UDP datagrams of one queue pair's messages, every byte of which its program checks."""
    harness.require_commands("tshark")
    packets = lab.directory / "stream.pcapng"
    capture = harness.Running(lab.host(1).command("capture", "-s", "60", "-w", packets))
    try:
        cm.wait_until(lambda: packets.exists() and packets.stat().st_size > 0, "the capture does not begin")
        words = ["ibv_rc_pingpong", "-g", "0", "-c", "-s", "1048576", "-n", "32", "-m", "4096"]
        pingpong.unhurried(pingpong.run_pair)(lab.host(1), words, lab.host(2))
        capture.terminate()
        capture.wait(20)
    finally:
        capture.kill()
    fields = ["-e", "ip.src", "-e", "udp.srcport", "-e", "udp.length"]
    found = harness.run(["tshark", "-r", packets, "-Y", f"udp.dstport == {roce.PORT}", "-T", "fields", *fields])
    lines = [line.split("\t") for line in found.splitlines() if line.count("\t") == 2]  # not tshark's warnings
    need(len({source for source, _, length in lines if int(length) > 4096}) == 2, f"no stream each way:\n{found[:2000]}")
    return lines


@pytest.mark.usual_shards  # of each shard there are two
def test_a_stream_takes_several_source_ports(lab, server, client, before):
    """Routers that choose among paths by ports spread even one queue pair's messages. Acknowledgements keep one port."""
    lines = stream_packets(lab)
    for source in {source for source, _, _ in lines}:
        ports = {port for other, port, length in lines if other == source and int(length) > 4096}
        need(len(ports) >= 4, f"the stream of {source} has only the ports {ports}")
        ports = {port for other, port, length in lines if other == source and int(length) == 8 + 12 + 4 + 4}
        need(len(ports) == 1, f"the acknowledgements of {source} have the ports {ports}")


def test_a_stream_keeps_its_source_port_where_it_is_told_to(tmp_path, monkeypatch):
    router = tmp_path / "freeflow-router"
    router.write_text(f"#!/bin/sh\nexec {harness.settings.DIST}/bin/freeflow-router \"$@\" --wire-options '{{\"spread\": false}}'\n")
    router.chmod(0o755)
    monkeypatch.setenv("FREEFLOW_ROUTER", str(router))
    with harness.Lab(2, 4200) as lab:
        lines = stream_packets(lab)
    for source in {source for source, _, _ in lines}:
        ports = {port for other, port, length in lines if other == source and int(length) > 4096}
        need(len(ports) == 1, f"the stream of {source} has the ports {ports}")


def test_perftest_to_a_group(lab, server, client, before):
    to_group(server, client, lab.directory)


@pytest.mark.parametrize("words", [" ".join(words) for words in pingpong_rows()])
def test_pingpong(lab, before, words):
    pingpong.unhurried(pingpong.run_pair)(lab.host(1), words.split(), lab.host(2))


@pytest.mark.parametrize("case", statuses.names())
def test_statuses(in_two, case):
    in_two.check(case)


def test_packets_carried_it(lab, before):
    wire.went_through_packets(lab.host(1))


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_in_router(lab, before, number):
    harness.wait_for_resources(lab.host(number), before[number - 1])
