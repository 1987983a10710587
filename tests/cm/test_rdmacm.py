"""Debian's rdmacm-utils, unmodified, by the drop-in librdmacm: two containers of one host, then of two hosts of a lab.

tests/interop/test_cm_external.py runs a part of these rows against Linux's own connection manager.
"""

import hashlib
import os
import tempfile

import pytest

import harness
from harness import cm, need, rdmacm
from harness.cm import Row
from harness.settings import DIST, FULL

FILE_BYTES = (1, 4096, 65537, 3_000_001, 16 << 20)


def connection_rows():
    """rping, ucmatose, udaddy and the small ones."""
    of = Row.of
    yield of("rping -s -a {ip} -C 10 -v", "rping -c -a {ip} -C 10 -v", "rdma-ping-9:", server_says=("rdma-ping-9:",))
    yield of("rping -s -C 10 -V -S 65535", "rping -c -a {ip} -C 10 -V -S 65535")
    yield of("rping -s -a {ip} -C 20 -V -S 23", "rping -c -I {client} -a {ip} -C 20 -V -S 23")
    yield of("rping -s -q -a {ip} -C 10", "rping -c -q -a {ip} -C 10")
    yield of("rping -s -a {ip} -C 10 -p 9999", "rping -c -q -a {ip} -C 10 -p 9999")
    yield of("rping -s -P -a {ip}", "rping -c -a {ip} -C 20 -V", stays=True, clients=4)
    yield of("rping -s -a ::0 -C 10 -V", "rping -c -a {ip} -C 10 -V")
    yield of("rping -s -a ::0 -C 10 -V", "rping -c -a ::ffff:{ip} -C 10 -V")
    # Linux never asks more than 32 connections of a backlog that was not read; ucmatose gives its count as the backlog.
    yield of("ucmatose -c 64", "ucmatose -s {ip} -c 64", "return status 0", server_says=("return status 0",))
    yield of("ucmatose -c 8 -m -C 5 -S 4000", "ucmatose -s {ip} -c 8 -m -C 5 -S 4000", "migrating", "return status 0")
    yield of("ucmatose -c 4 -f ip -t 32 -a 14", "ucmatose -s {ip} -b {client} -c 4 -f ip -t 32 -a 14", "return status 0")
    yield of("udaddy -c 4", "udaddy -s {ip} -c 4", "return status 0", server_says=("return status 0",))
    yield of("udaddy -c 8 -C 20 -S 1000 -t 32", "udaddy -s {ip} -b {client} -c 8 -C 20 -S 1000 -t 32", "return status 0")
    yield of("rdma_server", "rdma_client -s {ip}", "end 0", server_says=("end 0",))
    yield of("rdma_xserver", "rdma_xclient -s {ip}", "end 0", server_says=("end 0",))
    yield of("rdma_xserver -c r -p 7500", "rdma_xclient -s {ip} -c r -p 7500", "end 0", server_says=("end 0",))
    yield of("rdma_xserver -c x", "rdma_xclient -s {ip} -c x", "end 0", server_says=("end 0",))
    yield of("cmtime -c 100", "cmtime -s {ip} -c 100", "destroy", stays=True)
    yield of("cmtime -b {ip} -c 10", "cmtime -s {ip} -b {client} -c 10 -r 3 -t 3000", "destroy", stays=True)


def stream_rows():
    """rstream and riostream: every mode, sizes of one and of many buffers."""
    result = "custom"
    for server_mode, client_mode in ((None, None), ("a", "a"), ("b", "b"), ("n", "n"), ("v", "v"), ("r", "r"), ("a", "b"),
                                     ("n", "a")):
        # A program that resolves by rdma_getaddrinfo wants an address to listen at.
        server = f"rstream -T {server_mode}" if server_mode else "rstream"
        server += " -b {ip}" if server_mode == "r" else ""
        client = f"rstream -T {client_mode}" if client_mode else "rstream"
        # rstream takes the other's hang-up for an error, also if there is something to read: 16 is POLLHUP.
        codes = (0, 16) if "a" in (server_mode, client_mode) else (0,)
        for size, count in ((64, 200), (40000, 50)):
            options = f"-I 4 -C {count} -S {size}"
            yield Row.of(f"{server} {options}", f"{client} -s {{ip}} {options}", server_says=(result,), client_codes=codes)
    for options in ("-i 0 -B 65536 -k 5 -I 2 -C 5 -S 200000", "-B 4096 -I 2 -C 20 -S 100000 -T v", "-f ip -I 2 -C 20 -S 1"):
        yield Row.of(f"rstream {options}", f"rstream -s {{ip}} {options}", result)
    if FULL:  # 100,000 round trips of every small size
        for program in ("rstream", "riostream"):
            yield Row.of(f"{program} -S all", f"{program} -s {{ip}} -S all", "1m_bw", seconds=180)
    for mode in ("", " -T a", " -T b", " -T n", " -T v"):
        options = f"-I 4 -C 50 -S 6400{mode}"
        yield Row.of(f"riostream {options}", f"riostream -s {{ip}} {options}", server_says=(result,), client_codes=(0, 16))


def standard_sockets(server, client, mode):
    """rstream by TCP: the preload library must not be needed, nor meddle."""
    options = ["-T", mode, "-I", "2", "-C", "50", "-S", "6400"]
    harness.in_two_containers(server, client, ["rstream", *options], ["rstream", *options, "-s", "{ip}"], port=cm.PORT)


def copies(server, client):
    """rcopy, files of several sizes, one server for all."""
    # Where the containers see it too; /tmp is their own.
    with tempfile.TemporaryDirectory(prefix="freeflow-rcopy.", dir="/var/tmp") as directory:
        with cm.listening(server, "rcopy", "-p", "7475"):
            for size in FILE_BYTES:
                source, target = f"{directory}/source{size}", f"{directory}/target{size}"
                with open(source, "wb") as file:
                    file.write(os.urandom(size))
                client.exec("rcopy", source, f"{server.ip}:{target}", "-p", "7475")
                cm.wait_until(lambda: os.path.exists(target) and os.path.getsize(target) == size,
                                  f"the copy of {size} bytes is not whole")
                need(digest(source) == digest(target), f"the copy of {size} bytes differs")
    return f"{len(FILE_BYTES)} files"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def without_router():
    """tests/programs/rdmacm.c: the C interface."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(DIST / "lib"), "FREEFLOW_SOCKET": "/nonexistent/router.sock"}
    harness.run([harness.program("rdmacm"), "alone"], 20, env=env)


def router_ends(host, container):
    """A program of the container that waits for everything there is."""
    program = container.start(harness.program("rdmacm"), "death")
    program.wait_for_output("ready")
    harness.end_router(host)
    cm.finish(program, 20)


def in_one_process(container):
    output = container.exec(harness.program("rdmacm"), "pair", container.ip)
    count = output.count("ok  ")
    need("FAIL" not in output and count == 8, output)
    return f"{count} cases"


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands(*rdmacm.PROGRAMS)


def test_c_interface_without_a_router():
    without_router()


@pytest.mark.parametrize("row", connection_rows(), ids=lambda row: row.name)
def test_connections(ends, row):
    cm.check_row(ends.server, ends.client, row)


@pytest.mark.parametrize("row", stream_rows(), ids=lambda row: row.name)
def test_streams(ends, row):
    cm.check_row(ends.server, ends.client, row)


@pytest.mark.parametrize("mode", ["s", "f"])
def test_rstream_by_tcp(ends, mode):
    standard_sockets(ends.server, ends.client, mode)


def test_rcopy(ends):
    copies(ends.server, ends.client)


@pytest.mark.parametrize("options", [(), ("-C", "30", "-S", "1000")], ids=["small", "large messages"])
def test_mckey(ends, options):
    rdmacm.multicast((ends.server, ends.third), ends.client, options)


@pytest.mark.parametrize("ends", ["one host"], indirect=True)
def test_c_interface_both_ends_in_one_process(ends):
    in_one_process(ends.server)


def test_no_identifier_is_left(ends):
    for host in ends.hosts:
        cm.wait_for_none(host)


def test_nothing_is_left_in_the_routers(ends):
    for host, held in zip(ends.hosts, ends.held):
        harness.wait_for_resources(host, held)


def test_program_learns_that_the_router_ends(host, container):
    router_ends(host, container)
