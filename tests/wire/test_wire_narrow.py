"""RDMA between two hosts of a lab with Ethernet's MTU: perftest and random requests."""

import pytest

from harness import Lab, perftest, wire

# Path MTU 1024 is what fits into Ethernet's frames.
NARROW = [
    "ib_send_bw -F -n 200 -m 1024 -s 65537",
    "ib_send_lat -F -n 100 -m 1024 -s 1025 -e",
    "ib_write_bw -F -n 200 -m 1024 -b",
    "ib_write_bw -c UC -F -n 200 -m 1024",
    "ib_read_bw -F -n 200 -m 1024 -s 10001",
    "ib_write_bw -F -n 200 -m 256 -s 20000",
    "ib_read_lat -F -n 100 -m 512 -s 4000",
    "ib_send_bw -c UD -F -n 200 -m 1024",
    "ib_send_bw -c XRC -F -n 200 -m 1024",
    "ib_atomic_lat -F -n 100 -m 1024",
]


@pytest.fixture(scope="module")
def lab():
    with Lab(2, 1500) as lab:
        yield lab


@pytest.fixture(scope="module")
def pair(lab):
    return lab.pair()


@pytest.mark.parametrize("words", NARROW)
def test_perftest(lab, server, client, words):
    perftest.one(server, client, wire.patient(words.split()), lab.directory)


@pytest.mark.parametrize("options", ["-m 1024", "-m 256 -q 2"], ids=["path MTU 1024", "path MTU 256"])
def test_random_requests(server, client, options):
    wire.model(server, client, *options.split())


def test_packets_carried_it(lab, pair):
    wire.went_through_packets(lab.host(1))
