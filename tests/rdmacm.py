#!/usr/bin/env python3
"""Debian's rdmacm-utils, unmodified, by the drop-in librdmacm: two containers of one host, then of two hosts of a lab.

tests/cm_external.py runs a part of these rows against Linux's own connection manager.
"""

import hashlib
import os
import sys
import tempfile
import time

import lib
import lib_cm
from lib import need
from lib_cm import Row

MTU = 4200
PROGRAMS = ("rping", "ucmatose", "udaddy", "mckey", "rdma_server", "rdma_client", "rdma_xserver", "rdma_xclient", "cmtime",
            "rstream", "riostream", "rcopy")
GROUP = "239.1.2.3"
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
        # Who resolves by rdma_getaddrinfo wants an address to listen at.
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
    if lib.FULL:  # 100,000 round trips of every small size
        for program in ("rstream", "riostream"):
            yield Row.of(f"{program} -S all", f"{program} -s {{ip}} -S all", "1m_bw", seconds=180)
    for mode in ("", " -T a", " -T b", " -T n", " -T v"):
        options = f"-I 4 -C 50 -S 6400{mode}"
        yield Row.of(f"riostream {options}", f"riostream -s {{ip}} {options}", server_says=(result,), client_codes=(0, 16))


def standard_sockets(server, client, mode):
    """rstream by TCP: the preload library must not be needed, nor meddle."""
    options = ["-T", mode, "-I", "2", "-C", "50", "-S", "6400"]
    lib.in_two_containers(server, client, ["rstream", *options], ["rstream", *options, "-s", "{ip}"], port=lib_cm.PORT)


def multicast(members, sender, options=()):
    """mckey: all members hear the sender. It waits some seconds before it sends, in which all have to join."""
    words = ["mckey", "-m", GROUP, *options]
    ends = [(end, end.start(*words, "-b", end.ip)) for end in members]
    time.sleep(1)
    ends.append((sender, sender.start(*words, "-b", sender.ip, "-s")))
    try:
        for _, running in ends:
            output = lib_cm.finish(running, 30)
            need("data transfers complete" in output and "return status 0" in output, output)
    finally:
        for end, running in ends:
            running.kill()
            end.background.remove(running)


def copies(server, client):
    """rcopy, files of several sizes, one server for all."""
    # Where the containers see it too; /tmp is their own.
    with tempfile.TemporaryDirectory(prefix="freeflow-rcopy.", dir="/var/tmp") as directory:
        with lib_cm.listening(server, "rcopy", "-p", "7475"):
            for size in FILE_BYTES:
                source, target = f"{directory}/source{size}", f"{directory}/target{size}"
                with open(source, "wb") as file:
                    file.write(os.urandom(size))
                client.exec("rcopy", source, f"{server.ip}:{target}", "-p", "7475")
                lib_cm.wait_until(lambda: os.path.exists(target) and os.path.getsize(target) == size,
                                  f"the copy of {size} bytes is not whole")
                need(digest(source) == digest(target), f"the copy of {size} bytes differs")
    return f"{len(FILE_BYTES)} files"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def without_router():
    """tests/c/rdmacm.c: the C interface."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(lib.DIST / "lib"), "FREEFLOW_SOCKET": "/nonexistent/router.sock"}
    lib.run([lib.program("rdmacm"), "alone"], 20, env=env)


def router_ends(host, container):
    """A program of the container that waits for everything there is."""
    program = container.start(lib.program("rdmacm"), "death")
    program.wait_for_output("ready")
    lib.end_router(host)
    lib_cm.finish(program, 20)


def in_one_process(container):
    output = container.exec(lib.program("rdmacm"), "pair", container.ip)
    count = output.count("ok  ")
    need("FAIL" not in output and count == 8, output)
    return f"{count} cases"


def every_program(checks, server, client, third, where):
    for row in connection_rows():
        checks.check(f"{where}: {row.name}", lib_cm.check_row, server, client, row)
    for row in stream_rows():
        checks.check(f"{where}: {row.name}", lib_cm.check_row, server, client, row)
    for mode in ("s", "f"):
        checks.check(f"{where}: rstream -T {mode}", standard_sockets, server, client, mode)
    checks.check(f"{where}: rcopy", copies, server, client)
    checks.check(f"{where}: mckey", multicast, (server, third), client)
    checks.check(f"{where}: mckey, large messages", multicast, (server, third), client, ("-C", "30", "-S", "1000"))


def test(checks):
    lib.require_commands(*PROGRAMS)
    wanted = sys.argv[1:]
    if not wanted or "one" in wanted:
        with lib.Host() as host:
            server, client = host.pair()
            third = host.container("three")
            before = lib.router_resources(host)
            checks.check("the C interface without a router", without_router)
            checks.check("the C interface, both ends in one process", in_one_process, server)
            every_program(checks, server, client, third, "one host")
            checks.check("one host: no identifier is left", lib_cm.wait_for_none, host)
            checks.check("one host: nothing is left in the router", lib.wait_for_resources, host, before)
            checks.check("the router ends", router_ends, host, server)
    if not wanted or "two" in wanted:
        with lib.Lab(2, MTU) as lab:
            server, client = lab.pair()
            third = lab.host(2).container("three")
            lab.wait_for_peers()
            before = [lib.router_resources(host) for host in lab.hosts]
            every_program(checks, server, client, third, "two hosts")
            for host, held in zip(lab.hosts, before):
                checks.check(f"two hosts: no identifier is left at {host.number}", lib_cm.wait_for_none, host)
                checks.check(f"two hosts: nothing is left in router {host.number}", lib.wait_for_resources, host, held)


if __name__ == "__main__":
    lib.main(test)
