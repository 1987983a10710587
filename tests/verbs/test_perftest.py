"""Debian's perftest, unmodified, each end in its own container: every tool, transport and switch that they take.

No -x and no -d: the device and its one GID are found as on any machine. Few iterations: it is the programs' own checks
and tables that count here, not the figures (`make bench` is for those).
"""

import tempfile

import pytest

import harness
from harness import perftest, settings


EVERY_SIZE = (("write", "RC", "bw"), ("send", "RC", "lat"), ("send", "UD", "lat"))


def longest(transport):
    return ["-s", "4096" if transport == "UD" else "8388608"]


def matrix():
    """Each row: the program and its switches."""
    for verb in ("send", "write", "read", "atomic"):
        transports = {"send": ("RC", "UC", "UD"), "write": ("RC", "UC")}.get(verb, ("RC",))
        for transport in transports:
            for kind in ("bw", "lat"):
                tool = f"ib_{verb}_{kind}"
                base = [tool, "-c", transport, "-F"]
                iterations = ["-n", "500"]
                yield base + iterations
                yield base + iterations + ["--use_old_post_send"]
                size = [] if verb == "atomic" else ["-s", "2048" if transport == "UD" else "65536"]
                if size:
                    yield base + iterations + size
                if verb in ("send", "write"):
                    yield base + iterations + ["-I", "64"]
                if verb in ("send", "read", "atomic"):
                    yield base + iterations + ["-e"]
                if verb != "atomic":
                    # perftest measures its processor's clock for each size, 0.4 s: all sizes of one verb, and the longest.
                    sizes = ["-a"] if settings.FULL or (verb, transport, kind) in EVERY_SIZE else longest(transport)
                    yield base + [*sizes, "-n", "20" if kind == "bw" else "10"]
                if kind == "bw":
                    yield base + iterations + ["-q", "8"]
                    yield base + ["-D", "2"]
                    if verb != "atomic":
                        # -n is a multiple of what a completion counts for, 64 here. Else perftest counts more for the last one
                        # than were sent, believes in all before one queue pair has posted its last, and never polls again.
                        yield base + ["-n", "512", "-q", "8", "-s", "4096", "-t", "64"]
                    yield base + iterations + ["-b"]
                    yield base + iterations + ["-b", "-q", "4", "--use_old_post_send"]
                if verb == "send" and transport != "UC":
                    yield base + iterations + ["--use-srq"]
                    yield base + iterations + ["--use-srq", "-e"]
                    if kind == "bw":
                        # Of four queue pairs' datagrams the SRQ has RECVs for a quarter; what comes while the server has no
                        # processor to post more is lost, and it waits for ever.
                        slow = ["--rate_limit=500", "--rate_limit_type=SW", "--rate_units=p"] if transport == "UD" else []
                        yield base + iterations + ["--use-srq", "-q", "4", *slow]
    yield ["ib_atomic_bw", "-A", "CMP_AND_SWAP", "-F", "-n", "500"]
    yield ["ib_atomic_lat", "-A", "CMP_AND_SWAP", "-F", "-n", "500"]
    yield ["ib_write_bw", "-F", "-s", "8388608", "-n", "20"]
    yield ["ib_read_bw", "-F", "-o", "1", "-n", "300"]
    yield ["ib_send_bw", "-F", "-r", "4", "-t", "4", "-n", "2000"]
    yield ["ib_write_bw", "-F", "-m", "1024", "-n", "300"]
    yield from extended_connections()
    yield from on_demand_paging()
    yield from by_rdma_cm()
    for words in OTHER_SWITCHES:
        yield words.split()


def extended_connections():
    """XRC: every verb, with both ways to post."""
    for verb in ("send", "write", "read", "atomic"):
        for kind in ("bw", "lat"):
            base = [f"ib_{verb}_{kind}", "-c", "XRC", "-F", "-n", "300"]
            yield base
            yield base + ["--use_old_post_send"]
            if verb in ("send", "read", "atomic"):
                yield base + ["-e"]
            if kind == "bw":
                yield base + ["-q", "4"]
                yield base + ["-b"]
            if verb == "send":
                yield base + ["-s", "65536"]


def on_demand_paging():
    """perftest itself refuses it for atomics."""
    for verb in ("send", "write", "read"):
        for kind in ("bw", "lat"):
            yield [f"ib_{verb}_{kind}", "--odp", "-F", "-n", "300"]
    yield ["ib_send_bw", "-c", "UD", "--odp", "-F", "-n", "300"]
    yield ["ib_write_bw", "--odp", "-F", "-n", "50", "-s", "1048576"]
    yield ["ib_send_bw", "-c", "XRC", "--odp", "-F", "-n", "300"]


def by_rdma_cm():
    """-R: connected by rdma_cm: every tool with each transport that it takes then (not UC and XRC)."""
    for verb in ("send", "write", "read", "atomic"):
        for transport in {"send": ("RC", "UD")}.get(verb, ("RC",)):
            for kind in ("bw", "lat"):
                base = [f"ib_{verb}_{kind}", "-R", "-c", transport, "-F", "-n", "300"]
                yield base
                if verb != "write":
                    yield base + ["-e"]
                if kind == "bw":
                    yield base + ["-q", "4"]
                    yield base + ["-b"]
                if verb == "send" and transport == "RC":
                    yield base + ["--use-srq"]
    for words in CM_SWITCHES:
        yield words.split()


# Switches that exist only with -R, or might act otherwise with it.
CM_SWITCHES = [
    "ib_send_bw -z -F -n 300",
    "ib_write_bw -R -z -F -n 300",
    "ib_send_bw -R -T 96 -F -n 300",
    "ib_send_bw -R --retry_count=3 -F -n 300",
    "ib_write_bw -R -F -s 8388608 -n 10",
    "ib_send_lat -R -F -n 300 -I 64",
    "ib_write_bw -R -F -D 2 -q 2",
    "ib_read_bw -R -F -o 1 -n 300",
    "ib_send_bw -R -F -m 1024 -n 300",
    "ib_write_bw -R -F -n 320 -q 8 -t 32 -s 4096",
]
# The remaining switches, once each. Left out: those of two ports, InfiniBand, raw packets (-L), a GPU or a vendor's device, --rate_limit in hardware, --use_hugepages, which needs the machine's administrator,
# --dont_xchg_versions, which this version refuses itself, and --run_infinitely. (Warming up waits for a completion of each
# request, so it needs -Q 1.)
OTHER_SWITCHES = [
    "ib_send_bw -F -n 512 -l 8",
    "ib_send_bw -F -n 512 -l 8 --use_old_post_send",
    "ib_send_bw -F -n 512 --recv_post_list=8",
    "ib_write_bw -F -n 512 -l 16 -q 2",
    f"ib_send_bw -c UD -F -n 500 -g -M {perftest.GROUP}",
    f"ib_send_lat -c UD -F -n 500 -g -M {perftest.GROUP}",
    "ib_send_bw -F -n 500 -N",
    "ib_send_bw -F -n 500 -Q 10",
    "ib_send_bw -F -n 500 -S 3",
    "ib_send_bw -F -n 500 --tclass=8",
    "ib_send_bw -F -n 500 -u 18",
    "ib_send_bw -F -n 500 -X 0 -e",
    "ib_send_bw -F -n 500 -w 0.001 -y 0.00001",
    "ib_write_bw -F -n 500 -W counters/port_xmit_data,counters/port_rcv_data,hw_counters/rx_write_requests",
    "ib_write_bw -F -n 500 --out_json --out_json_file={files}-{side}.json",
    "ib_write_bw -F -D 2 --cpu_util",
    "ib_write_bw -F -D 2 -f 0",
    "ib_send_bw -F -n 500 --inline_recv=0",
    "ib_write_bw -F -n 500 -q 4 --mr_per_qp",
    "ib_write_bw -F -n 500 --pkey_index=0",
    "ib_send_bw -F -n 500 --force-link=Ethernet",
    "ib_write_bw -F -n 500 --perform_warm_up",
    "ib_atomic_bw -F -n 500 --perform_warm_up -Q 1",
    "ib_write_bw -F -n 500 -b --report-both",
    "ib_write_bw -F -n 500 --report_gbits",
    "ib_write_bw -F -n 500 --reversed",
    "ib_send_bw -F -n 500 --reversed",
    "ib_write_bw -F -n 500 --wait_destroy=1",
    "ib_write_bw -F -n 500 --disable_pcie_relaxed",
    "ib_write_bw -F -n 500 --rate_limit=1 --rate_limit_type=SW",
    "ib_write_bw -F -n 500 -s 4096 --rate_limit=2 --rate_limit_type=SW --rate_units=M --burst_size=4",
    "ib_write_bw -F -n 500 --mmap={files}-{side}.mmap --mmap-offset=4096",
    "ib_write_lat -F -n 500 -C",
    "ib_write_lat -F -n 500 -H",
    "ib_write_lat -F -n 500 -U",
    "ib_write_lat -F -n 200 --latency_gap=20",
    "ib_send_lat -F -D 2",
]


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands("ib_send_bw", "ib_atomic_lat")


@pytest.fixture(scope="module")
def directory():
    """Where the containers see it too; /tmp is their own."""
    with tempfile.TemporaryDirectory(prefix="freeflow-perftest.", dir="/var/tmp") as directory:
        yield directory


@pytest.mark.sampled
@pytest.mark.parametrize("words", [" ".join(words) for words in matrix()])
def test_perftest(server, client, directory, words):
    perftest.one(server, client, words.split(), directory)
