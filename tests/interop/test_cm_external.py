"""rdma_cm between a container and Linux: rdma-core's own librdmacm and the kernel's connection manager in the guest.

The guest and the network are those of test_external.py. A container has the host's address there: the guest connects to it, and
the port says which container is meant.
"""

import pytest

import harness
from harness import Failure, Host, cm, external, need, rdmacm
from harness.cm import Row
from harness.external import GUEST, HOST

SECONDS = 900
# perftest waits a second for an acknowledgement that an emulator owes.
TIMEOUT = "-u 18"


class Outward:
    """A container as the guest sees it."""

    def __init__(self, container):
        self.container, self.ip, self.host = container, HOST, container.host

    def __getattr__(self, name):
        return getattr(self.container, name)


def rows():
    of = Row.of
    yield of("rping -s -C 10 -v", "rping -c -a {ip} -C 10 -v", "rdma-ping-9:", server_says=("rdma-ping-9:",))
    yield of("rping -s -C 5 -V -S 65535", "rping -c -a {ip} -C 5 -V -S 65535")
    yield of("rping -s -a {ip} -q -C 10", "rping -c -q -a {ip} -C 10")
    yield of("rping -s -P", "rping -c -a {ip} -C 5 -V", stays=True, clients=3)
    yield of("ucmatose -c 16", "ucmatose -s {ip} -c 16", "return status 0", server_says=("return status 0",), seconds=45)
    yield of("ucmatose -c 4 -m -C 5 -S 4000 -t 32", "ucmatose -s {ip} -c 4 -m -C 5 -S 4000 -t 32", "return status 0")
    yield of("udaddy -c 4", "udaddy -s {ip} -c 4", "return status 0", server_says=("return status 0",))
    yield of("udaddy -c 2 -C 5 -S 1000 -t 32", "udaddy -s {ip} -c 2 -C 5 -S 1000 -t 32", "return status 0")
    yield of("rdma_server", "rdma_client -s {ip}", "end 0", server_says=("end 0",))
    yield of("rdma_xserver", "rdma_xclient -s {ip}", "end 0", server_says=("end 0",))
    yield of("cmtime -c 10", "cmtime -s {ip} -c 10", "destroy", stays=True)
    for mode in ("", " -T b", " -T n", " -T v"):
        options = f"-I 2 -C 20 -S 6400{mode}"
        yield of(f"rstream {options}", f"rstream -s {{ip}} {options}", server_says=("custom",))
    yield of("riostream -I 2 -C 20 -S 6400 -T v", "riostream -s {ip} -I 2 -C 20 -S 6400 -T v", server_says=("custom",),
             client_codes=(0, 16))
    yield of(f"ib_send_bw -R -F -n 100 -s 8192 {TIMEOUT}", f"ib_send_bw -R -F -n 100 -s 8192 {TIMEOUT} {{ip}}", "8192", seconds=45)
    yield of(f"ib_read_lat -R -F -n 100 {TIMEOUT}", f"ib_read_lat -R -F -n 100 {TIMEOUT} {{ip}}", seconds=45)
    yield of(f"ib_send_lat -R -c UD -F -n 100 {TIMEOUT}", f"ib_send_lat -R -c UD -F -n 100 {TIMEOUT} {{ip}}", seconds=45)


# perftest's server begins to listen for its second connection when the client may have asked for it already. The guest is slow.
TOO_EARLY = "RDMA_CM_EVENT_REJECTED; error: 8"
TOO_EARLY_MAX = 6


def check_row(server, client, row):
    for attempt in range(TOO_EARLY_MAX):
        try:
            return cm.check_row(server, client, row)
        except Failure as failure:
            early = TOO_EARLY in str(failure) and row.server[0].startswith("ib_")
            if not early or attempt + 1 == TOO_EARLY_MAX:
                raise


def refused(client, address):
    """Nobody listens there; and a program's own no."""
    output = client.exec(harness.program("cm"), "nobody", address, 7999, seconds=60)
    need("all right" in output, output)


def private_data(server, client):
    program = harness.program("cm")
    cm.run_row(server, client, Row("", [program, "data-server", 7471], [program, "data", "{ip}", 7471], ("all right",),
                                       ("all right",), seconds=60))


def dead_listener(server, client):
    """With half-open requests of the other side."""
    program = harness.program("cm")
    with cm.listening(server, program, "hold", 7471):
        crowd = client.start(program, "crowd", server.ip, 7471, 10)
        crowd.wait_for_output("connects")
        server.exec("/bin/sh", "-c", "kill -KILL $(pidof -s cm)")
    try:
        return cm.finish(crowd, 60).strip().splitlines()[-1]
    finally:
        crowd.kill()
        client.background.remove(crowd)


@pytest.fixture(scope="module")
def surroundings():
    harness.require_commands(*rdmacm.PROGRAMS, "unshare", "rdma")
    with external.surroundings([f"{GUEST}/24"], [f"{HOST}/24"], SECONDS) as surroundings:
        yield surroundings


@pytest.fixture(scope="module")
def guest(surroundings):
    return surroundings[0]


@pytest.fixture(scope="module")
def host(surroundings):
    policy = [{"network": "default", "allow": [f"{GUEST}/32"]}]
    with Host("--mode", "lowcpu", "--peers", external.peers_file(surroundings[1], HOST, policy)) as host:
        yield host


@pytest.fixture(scope="module")
def both(host, guest):
    container = Outward(host.container("one"))
    guest.wait_until_up()
    external.Ends(host, guest, container).set_mtu(4096)
    return container, guest


@pytest.fixture(scope="module")
def held(host, both):
    return harness.router_resources(host)


@pytest.fixture(scope="module", params=["guest to container", "container to guest"])
def way(request, both, held):
    """The server and the client."""
    return both if request.param == "guest to container" else both[::-1]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_connections(way, row):
    check_row(*way, row)


def test_private_data_of_every_length(way):
    private_data(*way)


def test_port_where_nobody_listens(way):
    refused(way[1], way[0].ip)


def test_listener_dies(way):
    dead_listener(*way)


def test_no_identifier_is_left(host, held):
    cm.wait_for_none(host, 60)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
