"""Unmodified socket programs over RDMA by the preload library: two containers of one host, then of two hosts of a lab.

iperf3, curl with Python's small HTTP server, redis and NetPIPE. rstream and its like, which call rsockets by name, are in
tests/cm/test_rdmacm.py.
"""

import hashlib
import os
import re
import tempfile

import pytest

import harness
from harness import Failure, cm, need, rsocket
from harness.settings import PROGRAMS

HTTP_PORT, REDIS_PORT, NETPIPE_PORT, FORKS_PORT, ENDS_PORT = 8000, 6379, 5002, 5600, 5700
FILE_BYTES = (0, 1, 65536, 5_000_003)
REDIS_REQUESTS = 2000
SECONDS = 60
# It would ask name servers for its own name, and there are none in a container: ten seconds.
WEB = """
import runpy, socket
socket.getfqdn = str
runpy.run_module("http.server", run_name="__main__")
"""


def http(server, client):
    """curl takes several files, two at a time from the same server."""
    # Where the containers see it too; /tmp is their own.
    with tempfile.TemporaryDirectory(prefix="freeflow-http.", dir="/var/tmp") as directory:
        for size in FILE_BYTES:
            with open(f"{directory}/file{size}", "wb") as file:
                file.write(os.urandom(size))
        with rsocket.serving(server, HTTP_PORT, "/usr/bin/python3", "-c", WEB, HTTP_PORT, "--bind", server.ip, "--directory", directory):
            url = f"http://{server.ip}:{HTTP_PORT}"
            for size in FILE_BYTES:
                both = [client.start(*rsocket.by_rsocket("curl", "-sS", "--fail", "--max-time", "30", "-o",
                                                 f"{directory}/got{size}.{turn}", f"{url}/file{size}")) for turn in range(2)]
                for turn, running in enumerate(both):
                    cm.finish(running, SECONDS)
                    client.background.remove(running)
                    same = digest(f"{directory}/file{size}") == digest(f"{directory}/got{size}.{turn}")
                    need(same, f"the file of {size} bytes differs")
            client.exec(*rsocket.by_rsocket("curl", "-sS", "--fail", "--max-time", "30", f"{url}/none"), codes=(22,), seconds=SECONDS)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def redis(server, client):
    words = ["redis-server", "--port", REDIS_PORT, "--bind", server.ip, "--save", "", "--appendonly", "no",
             "--protected-mode", "no", "--dir", "/tmp"]
    with rsocket.serving(server, REDIS_PORT, *words):
        def command(*words):
            return client.exec(*rsocket.by_rsocket("redis-cli", "-h", server.ip, "-p", REDIS_PORT, *words), seconds=SECONDS).strip()

        need(command("SET", "one", "1") == "OK", "SET")
        need(command("GET", "one") == "1", "GET")
        value = "v" * 100_000
        need(command("SET", "large", value) == "OK", "SET of 100 kB")
        need(command("GET", "large") == value, "GET of 100 kB")
        need(command("INCRBY", "one", "41") == "42", "INCRBY")
        output = client.exec(*rsocket.by_rsocket("redis-benchmark", "-h", server.ip, "-p", REDIS_PORT, "-t", "set,get", "-n",
                                         REDIS_REQUESTS, "-c", "10", "--csv"), seconds=SECONDS)
    rates = re.findall(r'^"(SET|GET)","([\d.]+)"', output, re.MULTILINE)
    need(len(rates) == 2, output)
    return ", ".join(f"{name} {float(rate):.0f}/s" for name, rate in rates)


def netpipe(server, client, *options):
    words = ["NPtcp", "-P", NETPIPE_PORT, "-u", "65536", "-n", "10", "-o", "/dev/null", *options]
    with rsocket.serving(server, NETPIPE_PORT, *words) as running:
        output = client.exec(*rsocket.by_rsocket(*words, "-h", server.ip), seconds=SECONDS)
        cm.finish(running, 10)
    rows = re.findall(r"^ *\d+: +(\d+) bytes.*", output, re.MULTILINE)
    need(rows and int(rows[-1]) > 49152, output)
    return output.strip().splitlines()[-1].strip()


def ordinary_peer(server, client):
    """A server without rsockets: the client falls back to TCP."""
    words = ["iperf3", "-s", "-1", "-p", rsocket.IPERF_PORT + 1]
    client_words = rsocket.by_rsocket("iperf3", "-c", "{ip}", "-p", rsocket.IPERF_PORT + 1, "-t", "1")
    output = harness.in_two_containers(server, client, words, client_words, port=rsocket.IPERF_PORT + 1)[1]
    need("receiver" in output, output)


def loopback(server, client):
    """A socket bound to loopback is its own container's, and nobody else's."""
    words = ["redis-server", "--port", REDIS_PORT, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
    running = server.start(*rsocket.by_rsocket(*words))
    try:
        server.wait_for_port(running, REDIS_PORT)
        cli = lambda end, host, **more: end.exec(*rsocket.by_rsocket("redis-cli", "-h", host, "-p", REDIS_PORT, "PING"), seconds=SECONDS, **more)
        need(cli(server, "127.0.0.1").strip() == "PONG", "its own container does not reach it")
        for end in (client, server):
            answer = cli(end, server.ip, codes=(1,))
            need("refused" in answer, f"{end.name}: {answer}")
    finally:
        running.kill()
        server.background.remove(running)


def inside(server):
    """Descriptors, threads and children, in one container."""
    program = str(PROGRAMS / "rsocket_inside.py")
    output = server.exec(*rsocket.by_rsocket("/usr/bin/python3", program, server.ip), seconds=SECONDS)
    need(output.endswith("well\n"), output)


def calls(server):
    """tests/programs/rsocket_calls.c: several messages a call; connections that signal handlers close."""
    output = server.exec(*rsocket.by_rsocket(harness.program("rsocket_calls"), server.ip, FORKS_PORT), seconds=SECONDS)
    need(output.endswith("well\n"), output)


def epoll(server):
    """tests/programs/rsocket_epoll.c: repoll_wait and its like, of node RDMACM_1.5."""
    output = server.exec(harness.program("rsocket_epoll"), server.ip, FORKS_PORT, seconds=SECONDS)
    need(output.endswith("well\n"), output)


def forks(server, client):
    """A server whose children go on with its connections."""
    program = str(PROGRAMS / "rsocket_forks.py")
    words = lambda role: ["RDMAV_FORK_SAFE=1", "/usr/bin/python3", program, role, server.ip, FORKS_PORT]
    with rsocket.serving(server, FORKS_PORT, *words("serve")) as running:
        try:
            output = client.exec(*rsocket.by_rsocket(*words("drive")), seconds=SECONDS)
        except Failure as failure:
            raise Failure(f"{failure}\n--- the server printed:\n{running.output()}") from None
        need(output.endswith("well\n"), output)
        need(cm.finish(running, 30).endswith("well\n"), running.output())


def killed_ends(server, client):
    """A connection whose other end is killed, leaves or resets leaves nothing wrong behind."""
    program = str(PROGRAMS / "rsocket_ends.py")
    words = lambda role: ["/usr/bin/python3", program, role, server.ip, ENDS_PORT]
    with rsocket.serving(server, ENDS_PORT, *words("serve")) as running:
        output = client.exec(*rsocket.by_rsocket(*words("drive")), seconds=2 * SECONDS)
        need(output.endswith("well\n"), output)
        cm.finish(running, 30)


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands("iperf3", "curl", "redis-server", "redis-cli", "redis-benchmark", "NPtcp")
    need(rsocket.PRELOAD.exists(), f"{rsocket.PRELOAD} is not built: run `make`")


@pytest.mark.parametrize("ends", ["one host"], indirect=True)
@pytest.mark.parametrize("part", [inside, calls, epoll],
                         ids=["descriptors, threads and children", "several messages a call, signal handlers", "repoll_wait"])
def test_in_one_container(ends, part):
    part(ends.server)


@pytest.mark.parametrize("options", ["", "-R -P 4"], ids=["one way", "the other way, 4 streams"])
def test_iperf3(ends, options):
    rsocket.iperf3(ends.server, ends.client, *options.split())


def test_curl_and_http_server(ends):
    http(ends.server, ends.client)


def test_redis(ends):
    redis(ends.server, ends.client)


@pytest.mark.parametrize("options", [(), ("-i",)], ids=["speed", "contents"])
def test_netpipe(ends, options):
    netpipe(ends.server, ends.client, *options)


@pytest.mark.parametrize("mode", ["b", "n"])
def test_udpong(ends, mode):
    rsocket.datagrams(ends.server, ends.client, mode)


def test_children_that_go_on_with_connections(ends):
    forks(ends.server, ends.client)


def test_ends_that_are_killed_leave_or_reset(ends):
    killed_ends(ends.server, ends.client)


def test_server_bound_to_loopback(ends):
    loopback(ends.server, ends.client)


def test_server_without_rsockets(ends):
    ordinary_peer(ends.server, ends.client)


def test_no_identifier_is_left(ends):
    for host in ends.hosts:
        cm.wait_for_none(host)


def test_nothing_is_left_in_the_routers(ends):
    for host, held in zip(ends.hosts, ends.held):
        harness.wait_for_resources(host, held)
