#!/usr/bin/env python3
"""Debian's perftest, unmodified, each end in its own container: every tool, transport and switch that they take.

No -x and no -d: the device and its one GID are found as on any machine. Few iterations: it is the programs' own checks
and tables that count here, not the figures (`make bench` is for those).
"""

import re

import lib
from lib import need

ROW = re.compile(r"^ *\d+ +\d+ +\d+\.\d+ +\d+\.\d+", re.MULTILINE)
DURATION_ROW = re.compile(r"^ *\d+ +\d+ +\d+\.\d+", re.MULTILINE)


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
                    yield base + ["-a", "-n", "20" if kind == "bw" else "10"]
                if kind == "bw":
                    yield base + iterations + ["-q", "8"]
                    yield base + ["-D", "2"]
                    if verb != "atomic":
                        yield base + iterations + ["-q", "8", "-s", "4096", "-t", "64"]
                    yield base + iterations + ["-b"]
                    yield base + iterations + ["-b", "-q", "4", "--use_old_post_send"]
                if verb == "send" and transport != "UC":
                    yield base + iterations + ["--use-srq"]
                    yield base + iterations + ["--use-srq", "-e"]
                    if kind == "bw":
                        yield base + iterations + ["--use-srq", "-q", "4"]
    yield ["ib_atomic_bw", "-A", "CMP_AND_SWAP", "-F", "-n", "500"]
    yield ["ib_atomic_lat", "-A", "CMP_AND_SWAP", "-F", "-n", "500"]
    yield ["ib_write_bw", "-F", "-s", "8388608", "-n", "20"]
    yield ["ib_read_bw", "-F", "-o", "1", "-n", "300"]
    yield ["ib_send_bw", "-F", "-r", "4", "-t", "4", "-n", "2000"]
    yield ["ib_write_bw", "-F", "-m", "1024", "-n", "300"]


def one(server, client, words):
    _, output = lib.in_two_containers(server, client, words, [*words, "{ip}"], seconds=40)
    rows = DURATION_ROW if "-D" in words else ROW
    found = rows.findall(output)
    need(found, f"no row of results:\n{output}")
    if "-a" in words:
        need(len(found) >= 12, f"only {len(found)} sizes:\n{output}")
    return found[-1].strip()


def test(checks):
    lib.require_commands("ib_send_bw", "ib_atomic_lat")
    with lib.Host() as host:
        server, client = host.pair()
        for words in matrix():
            checks.check(" ".join(words), one, server, client, words)


if __name__ == "__main__":
    lib.main(test)
