#!/usr/bin/env python3
"""Unmodified socket programs over RDMA by the preload library: two containers of one host, then of two hosts of a lab.

iperf3, curl with Python's small HTTP server, redis and NetPIPE. rstream and its like, which call rsockets by name, are in
tests/rdmacm.py.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile

import lib
import lib_cm
from lib import need

MTU = 4200
PRELOAD = lib.DIST / "lib" / "rsocket" / "librspreload.so"
IPERF_PORT, HTTP_PORT, REDIS_PORT, NETPIPE_PORT, UDPONG_PORT, FORKS_PORT, ENDS_PORT = 5201, 8000, 6379, 5002, 7174, 5600, 5700
FILE_BYTES = (0, 1, 65536, 5_000_003)
REDIS_REQUESTS = 2000
SECONDS = 60
# It would ask name servers for its own name, and there are none in a container: ten seconds.
WEB = """
import runpy, socket
socket.getfqdn = str
runpy.run_module("http.server", run_name="__main__")
"""


def by_rsocket(*words):
    return ["env", f"LD_PRELOAD={PRELOAD}", *words]


def is_kernels(container, port):
    """Whether a TCP socket of the kernel's listens: then this would show nothing."""
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{container.pid}/net/{table}") as rows:
            if any(f":{port:04X} " in row.split(None, 2)[1] + " " and " 0A " in row for row in list(rows)[1:]):
                return True
    return False


@contextlib.contextmanager
def serving(server, port, *words):
    with lib_cm.listening(server, *by_rsocket(*words)) as running:
        need(not is_kernels(server, port), f"`{running.text()}` listens by TCP")
        yield running


def iperf3(server, client, *options):
    with serving(server, IPERF_PORT, "iperf3", "-s", "-1") as running:
        output = client.exec(*by_rsocket("iperf3", "-J", "-c", server.ip, "-t", "1", *options), seconds=SECONDS)
        end = json.loads(output)["end"]
        received = end["sum_received"]["bytes"]
        need(received > 1 << 20, f"only {received} bytes:\n{output[-1500:]}")
        lib_cm.finish(running, 10)
    return f"{end['sum_received']['bits_per_second'] / 1e9:.2f} Gb/s"


def http(server, client):
    """curl takes several files, two at a time from the same server."""
    # Where the containers see it too; /tmp is their own.
    with tempfile.TemporaryDirectory(prefix="freeflow-http.", dir="/var/tmp") as directory:
        for size in FILE_BYTES:
            with open(f"{directory}/file{size}", "wb") as file:
                file.write(os.urandom(size))
        with serving(server, HTTP_PORT, "/usr/bin/python3", "-c", WEB, HTTP_PORT, "--bind", server.ip, "--directory", directory):
            url = f"http://{server.ip}:{HTTP_PORT}"
            for size in FILE_BYTES:
                both = [client.start(*by_rsocket("curl", "-sS", "--fail", "--max-time", "30", "-o",
                                                 f"{directory}/got{size}.{turn}", f"{url}/file{size}")) for turn in range(2)]
                for turn, running in enumerate(both):
                    lib_cm.finish(running, SECONDS)
                    client.background.remove(running)
                    same = digest(f"{directory}/file{size}") == digest(f"{directory}/got{size}.{turn}")
                    need(same, f"the file of {size} bytes differs")
            client.exec(*by_rsocket("curl", "-sS", "--fail", "--max-time", "30", f"{url}/none"), codes=(22,), seconds=SECONDS)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def redis(server, client):
    words = ["redis-server", "--port", REDIS_PORT, "--bind", server.ip, "--save", "", "--appendonly", "no",
             "--protected-mode", "no", "--dir", "/tmp"]
    with serving(server, REDIS_PORT, *words):
        def command(*words):
            return client.exec(*by_rsocket("redis-cli", "-h", server.ip, "-p", REDIS_PORT, *words), seconds=SECONDS).strip()

        need(command("SET", "one", "1") == "OK", "SET")
        need(command("GET", "one") == "1", "GET")
        value = "v" * 100_000
        need(command("SET", "large", value) == "OK", "SET of 100 kB")
        need(command("GET", "large") == value, "GET of 100 kB")
        need(command("INCRBY", "one", "41") == "42", "INCRBY")
        output = client.exec(*by_rsocket("redis-benchmark", "-h", server.ip, "-p", REDIS_PORT, "-t", "set,get", "-n",
                                         REDIS_REQUESTS, "-c", "10", "--csv"), seconds=SECONDS)
    rates = re.findall(r'^"(SET|GET)","([\d.]+)"', output, re.MULTILINE)
    need(len(rates) == 2, output)
    return ", ".join(f"{name} {float(rate):.0f}/s" for name, rate in rates)


def netpipe(server, client, *options):
    words = ["NPtcp", "-P", NETPIPE_PORT, "-u", "65536", "-n", "10", "-o", "/dev/null", *options]
    with serving(server, NETPIPE_PORT, *words) as running:
        output = client.exec(*by_rsocket(*words, "-h", server.ip), seconds=SECONDS)
        lib_cm.finish(running, 10)
    rows = re.findall(r"^ *\d+: +(\d+) bytes.*", output, re.MULTILINE)
    need(rows and int(rows[-1]) > 49152, output)
    return output.strip().splitlines()[-1].strip()


def datagrams(server, client, mode):
    """udpong calls rsockets by name; its server never ends, and is no listener of connections' kind."""
    options = ["-T", mode, "-S", "64", "-C", "200"]
    running = server.start("udpong", "-b", server.ip, "-T", mode)
    try:
        lib_cm.wait_until(lambda: is_bound(server, UDPONG_PORT), "udpong does not begin", 15)
        output = client.exec("udpong", "-s", server.ip, *options, seconds=SECONDS)
        need("custom" in output, output)
    finally:
        running.kill()
        server.background.remove(running)
    return output.strip().splitlines()[-1].strip()


def is_bound(container, port):
    for table in ("udp", "udp6"):
        with open(f"/proc/{container.pid}/net/{table}") as rows:
            if any(f":{port:04X} " in row for row in rows):
                return True
    return False


def ordinary_peer(server, client):
    """A server without rsockets: the client falls back to TCP."""
    words = ["iperf3", "-s", "-1", "-p", IPERF_PORT + 1]
    client_words = by_rsocket("iperf3", "-c", "{ip}", "-p", IPERF_PORT + 1, "-t", "1")
    output = lib.in_two_containers(server, client, words, client_words, port=IPERF_PORT + 1)[1]
    need("receiver" in output, output)


def loopback(server, client):
    """What is bound to loopback is its own container's, and nobody else's."""
    words = ["redis-server", "--port", REDIS_PORT, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
    running = server.start(*by_rsocket(*words))
    try:
        server.wait_for_port(running, REDIS_PORT)
        cli = lambda end, host, **more: end.exec(*by_rsocket("redis-cli", "-h", host, "-p", REDIS_PORT, "PING"), seconds=SECONDS, **more)
        need(cli(server, "127.0.0.1").strip() == "PONG", "its own container does not reach it")
        for end in (client, server):
            answer = cli(end, server.ip, codes=(1,))
            need("refused" in answer, f"{end.name}: {answer}")
    finally:
        running.kill()
        server.background.remove(running)


def inside(server):
    """Descriptors, threads and children, in one container."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rsocket_inside.py")
    output = server.exec(*by_rsocket("/usr/bin/python3", program, server.ip), seconds=SECONDS)
    need(output.endswith("well\n"), output)


def calls(server):
    """tests/c/rsocket_calls.c: several messages a call; connections that signal handlers close."""
    output = server.exec(*by_rsocket(lib.program("rsocket_calls"), server.ip, FORKS_PORT), seconds=SECONDS)
    need(output.endswith("well\n"), output)


def epoll(server):
    """tests/c/rsocket_epoll.c: repoll_wait and its like, of node RDMACM_1.5."""
    output = server.exec(lib.program("rsocket_epoll"), server.ip, FORKS_PORT, seconds=SECONDS)
    need(output.endswith("well\n"), output)


def forks(server, client):
    """A server whose children go on with its connections."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rsocket_forks.py")
    words = lambda role: ["RDMAV_FORK_SAFE=1", "/usr/bin/python3", program, role, server.ip, FORKS_PORT]
    with serving(server, FORKS_PORT, *words("serve")) as running:
        try:
            output = client.exec(*by_rsocket(*words("drive")), seconds=SECONDS)
        except lib.Failure as failure:
            raise lib.Failure(f"{failure}\n--- the server printed:\n{running.output()}") from None
        need(output.endswith("well\n"), output)
        need(lib_cm.finish(running, 30).endswith("well\n"), running.output())


def ends(server, client):
    """What is left of a connection whose other end is killed, leaves or resets."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rsocket_ends.py")
    words = lambda role: ["/usr/bin/python3", program, role, server.ip, ENDS_PORT]
    with serving(server, ENDS_PORT, *words("serve")) as running:
        output = client.exec(*by_rsocket(*words("drive")), seconds=2 * SECONDS)
        need(output.endswith("well\n"), output)
        lib_cm.finish(running, 30)


def every_program(checks, server, client, where):
    checks.check(f"{where}: iperf3", iperf3, server, client)
    checks.check(f"{where}: iperf3, the other way, 4 streams", iperf3, server, client, "-R", "-P", "4")
    checks.check(f"{where}: curl and http.server", http, server, client)
    checks.check(f"{where}: redis", redis, server, client)
    checks.check(f"{where}: NetPIPE", netpipe, server, client)
    checks.check(f"{where}: NetPIPE, contents", netpipe, server, client, "-i")
    for mode in ("b", "n"):
        checks.check(f"{where}: udpong -T {mode}", datagrams, server, client, mode)
    checks.check(f"{where}: children that go on with connections", forks, server, client)
    checks.check(f"{where}: ends that are killed, leave or reset", ends, server, client)
    checks.check(f"{where}: a server bound to loopback", loopback, server, client)
    checks.check(f"{where}: a server without rsockets", ordinary_peer, server, client)


def test(checks):
    lib.require_commands("iperf3", "curl", "redis-server", "redis-cli", "redis-benchmark", "NPtcp")
    need(PRELOAD.exists(), f"{PRELOAD} is not built: run `make`")
    wanted = sys.argv[1:]
    if not wanted or "one" in wanted:
        with lib.Host() as host:
            server, client = host.pair()
            before = lib.router_resources(host)
            checks.check("one host: descriptors, threads and children", inside, server)
            checks.check("one host: several messages a call, signal handlers", calls, server)
            checks.check("one host: repoll_wait", epoll, server)
            every_program(checks, server, client, "one host")
            checks.check("one host: no identifier is left", lib_cm.wait_for_none, host)
            checks.check("one host: nothing is left in the router", lib.wait_for_resources, host, before)
    if not wanted or "two" in wanted:
        with lib.Lab(2, MTU) as lab:
            server, client = lab.pair()
            lab.wait_for_peers()
            before = [lib.router_resources(host) for host in lab.hosts]
            every_program(checks, server, client, "two hosts")
            for host, held in zip(lab.hosts, before):
                checks.check(f"two hosts: no identifier is left at {host.number}", lib_cm.wait_for_none, host)
                checks.check(f"two hosts: nothing is left in router {host.number}", lib.wait_for_resources, host, held)


if __name__ == "__main__":
    lib.main(test)
