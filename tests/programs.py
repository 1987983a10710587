#!/usr/bin/env python3
"""Programs that were written for other devices: UCX's ucx_perftest, qperf, libfabric's fi_pingpong.

They run between two containers, on one host by the direct path and routed, and between two hosts, idle and
beside a load of twice the processors. Most of them compare no byte, so a UCP program of ours that compares
all (tests/c/ucp.c) runs over each transport beside them.
"""

import contextlib
import pathlib
import re
import tempfile

import lib
import lib_mpi
import lib_paths
from lib import FULL, need

PLACES = ("one host", "routed", "two hosts")
UCX_PORT, UCP_PORT, QPERF_PORT, FABRIC_PORT = 13337, 13400, 19765, 47592
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


@contextlib.contextmanager
def place(name):
    if name == "two hosts":
        with lib.Lab(2, 4200) as lab:
            lab.wait_for_peers()
            yield lab.pair(), lab.hosts
    else:
        with lib.Host() as host:
            if name == "routed":
                need(lib_paths.set_path(host, "routed"), "the router does not take the data path")
            yield host.pair(), [host]


def ucp(pair, program, transports):
    """Both ends compare every byte; the rounds are the test's, the memory malloc's."""
    common = ["env", f"UCX_TLS={transports}", UCX_DEVICE, "MALLOC_MMAP_THRESHOLD_=32768", program, 100 if FULL else 20, lib.SEED]
    outputs = lib.in_two_containers(*pair, [*common, UCP_PORT], [*common, UCP_PORT, "{ip}"], seconds=120, port=UCP_PORT)
    for output in outputs:
        need(re.search(r"^right: [1-9]\d+ bytes", output, re.M), output)


def ucx(pair, transports):
    for test, bytes_, count in UCX_TESTS:
        common = ["env", f"UCX_TLS={transports}", UCX_DEVICE, "ucx_perftest", "-p", str(UCX_PORT)]
        options = ["-t", test, "-s", bytes_, "-n", count, "-w", "10"]
        _, output = lib.in_two_containers(*pair, common, [*common, "{ip}", *options], seconds=90, port=UCX_PORT)
        need(re.search(r"^Final:\s+\d+", output, re.M), output)


# The client may ask for a connection before the server listens for it, and does not try again.
@lib.again_after(["Event rejected"], 5)
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
    """It compares what it receives (-c)."""
    common = ["fi_pingpong", "-p", provider, "-e", kind, "-c", "-I", "100" if FULL else "20"]
    _, output = lib.in_two_containers(*pair, common, [*common, "{ip}"], seconds=60, port=FABRIC_PORT)
    need(re.search(r"^64\s+\d+", output, re.M), output)


def at_place(checks, where, program):
    with place(where) as (pair, hosts):
        before = [lib.router_resources(host) for host in hosts]
        for loaded in (False, True):
            suffix = f"{where}{', beside a load' if loaded else ''}"
            with lib_mpi.Load() if loaded else contextlib.nullcontext():
                for transport, words in TRANSPORTS.items():
                    if loaded and not FULL and transport != "default":
                        continue
                    checks.check(f"UCP, {transport}, {suffix}", ucp, pair, program, words)
                    if FULL or transport == "default":
                        checks.check(f"ucx_perftest, {transport}, {suffix}", ucx, pair, words)
                checks.check(f"qperf, {suffix}", qperf, pair)
                for provider, kind in FABRIC:
                    checks.check(f"fi_pingpong, {provider}, {suffix}", fabric, pair, provider, kind)
        for host, held in zip(hosts, before):
            checks.check(f"nothing is left in the router: {where}", lib.wait_for_resources, host, held)


def test(checks):
    lib.require_commands("ucx_perftest", "qperf", "fi_pingpong")
    with tempfile.TemporaryDirectory(prefix="freeflow-programs.") as directory:
        program = pathlib.Path(directory) / "ucp"
        lib.run(["cc", *lib_mpi.FLAGS, "-o", program, lib.ROOT / "tests" / "c" / "ucp.c", "-lucp", "-lucs"])
        for where in PLACES:
            at_place(checks, where, program)


if __name__ == "__main__":
    lib.main(test)
