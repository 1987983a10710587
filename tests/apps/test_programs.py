"""Programs that were written for other devices: UCX's ucx_perftest, qperf, libfabric's fi_pingpong, QEMU's migration.

They run between two containers, on one host by the direct path and routed, and between two hosts, idle and
beside a load of twice the processors. Most of them compare no byte, so a UCP program of ours that compares
all (tests/programs/ucp.c) runs over each transport beside them.
"""

import pathlib
import re
import tempfile

import pytest

import harness
from harness import mpi, need, places
from harness.settings import FULL, PROGRAMS, SEED

UCX_PORT, UCP_PORT, QPERF_PORT, FABRIC_PORT, QEMU_PORT = 13337, 13400, 19765, 47592, 4444
UCX_DEVICE = "UCX_NET_DEVICES=freeflow0:1"
TRANSPORTS = {"rc_v": "rc_v,self", "ud_v": "ud_v,self", "default": "all"}
UCX_TESTS = [("tag_lat", "8", "200"), ("ucp_get", "100000", "50"), ("ucp_fadd", "8", "200"), ("stream_bw", "4000", "200")]
# Those that connect by rdma_cm; the others know peers by LIDs alone, which no RoCE NIC takes.
QPERF_TESTS = [
    "rc_bw", "rc_bi_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat", "ver_rc_compare_swap", "ver_rc_fetch_add",
]
QPERF_SHORT = ["rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_write_poll_lat", "ver_rc_fetch_add"]
FABRIC = [("verbs", "msg"), ("verbs;ofi_rxm", "rdm")]


def ucp(pair, program, transports):
    """Both ends compare every byte; the rounds are the test's, the memory malloc's."""
    common = ["env", f"UCX_TLS={transports}", UCX_DEVICE, "MALLOC_MMAP_THRESHOLD_=32768", program, 100 if FULL else 20, SEED]
    outputs = harness.in_two_containers(*pair, [*common, UCP_PORT], [*common, UCP_PORT, "{ip}"], seconds=120, port=UCP_PORT)
    for output in outputs:
        need(re.search(r"^right: [1-9]\d+ bytes", output, re.M), output)


def ucx(pair, transports):
    for test, bytes_, count in UCX_TESTS:
        common = ["env", f"UCX_TLS={transports}", UCX_DEVICE, "ucx_perftest", "-p", str(UCX_PORT)]
        options = ["-t", test, "-s", bytes_, "-n", count, "-w", "10"]
        _, output = harness.in_two_containers(*pair, common, [*common, "{ip}", *options], seconds=90, port=UCX_PORT)
        need(re.search(r"^Final:\s+\d+", output, re.M), output)


# The client may ask for a connection before the server listens for it, and does not try again.
@harness.again_after(["Event rejected"], 5)
def qperf_client(pair, test):
    return pair[1].exec("qperf", pair[0].ip, "-cm", "1", "-t", "1", test, seconds=60)


def qperf(pair):
    server = pair[0].start("qperf")
    try:
        pair[0].wait_for_port(server, QPERF_PORT)
        for test in QPERF_TESTS if FULL else QPERF_SHORT:
            output = qperf_client(pair, test)
            need(re.search(r"^\s+(bw|send_bw|latency|msg_rate)\s+=\s+[\d.]+ ", output, re.M), f"{test}:\n{output}")
            need("failed" not in output, f"{test}:\n{output}")
    finally:
        server.kill()


def fabric(pair, provider, kind):
    """It compares what it receives (-c), and loses its last completions unless its peer is slow to go."""
    slow = f"LD_PRELOAD={harness.program('late_close.so')}"
    common = ["env", slow, "fi_pingpong", "-p", provider, "-e", kind, "-c", "-I", "100" if FULL else "20"]
    _, output = harness.in_two_containers(*pair, common, [*common, "{ip}"], seconds=60, port=FABRIC_PORT)
    need(re.search(r"^64\s+\d+", output, re.M), output)


def qemu(pair):
    """It polls two CQs, both mostly empty, for each page, and waits by events: no such poll may sleep."""
    program = PROGRAMS / "qemu_migration.py"
    words = ["/usr/bin/python3", program, QEMU_PORT]
    inside, output = harness.in_two_containers(*pair, words, [*words, "{ip}"], seconds=150, port=QEMU_PORT)
    need("right contents" in inside, f"{inside}\n{output}")
    sleeps, pages = map(int, re.search(r"^sleeps: (\d+) for (\d+) pages", output, re.M).groups())
    need(sleeps < pages / 2, f"{sleeps} sleeps for {pages} pages")


def jobs(loaded):
    """The name, the function and its words of each program; beside a load a choice of them."""
    for transport, words in TRANSPORTS.items():
        if FULL or transport == "default" or not loaded:
            yield f"UCP, {transport}", ucp, (words,)
        if FULL or transport == "default":
            yield f"ucx_perftest, {transport}", ucx, (words,)
    yield "qperf", qperf, ()
    for provider, kind in FABRIC:
        yield f"fi_pingpong, {provider}", fabric, (provider, kind)
    yield "QEMU's migration", qemu, ()


def chosen():
    for where in places.WHERE:
        for loaded in places.LOADS:
            for name, function, words in jobs(loaded == "loaded"):
                yield pytest.param(where, loaded, function, words, id=f"{name}, {where}, {loaded}")


@pytest.fixture(scope="module")
def ucp_program():
    """A UCP program that compares every byte."""
    harness.require_commands("ucx_perftest", "qperf", "fi_pingpong", "qemu-system-x86_64", "/usr/include/ucp/api/ucp.h")
    with tempfile.TemporaryDirectory(prefix="freeflow-programs.") as directory:
        program = pathlib.Path(directory) / "ucp"
        harness.run(["cc", *mpi.FLAGS, "-o", program, PROGRAMS / "ucp.c", "-lucp", "-lucs"])
        yield program


@pytest.mark.parametrize("place, load, function, words", chosen(), indirect=["place", "load"])
def test_program(ucp_program, place, load, function, words):
    function(place.pair, *((ucp_program,) if function is ucp else ()), *words)
