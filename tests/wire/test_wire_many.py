"""Many flows between hosts at once: three hosts all-to-all, then 64 pairs of containers with eight queue pairs each.

Each container is one process, and each process checks every byte against a model of its peer's memory (tests/programs/wire.c).
"""

import pathlib
import tempfile

import pytest

import harness
from harness import PORT, Lab, Running, need

MTU = 4200
ALL_TO_ALL_MS = 2000
PAIRS = 64
QPS = 8
MANY_MS = 5000
READY_SECONDS = 150
END_SECONDS = 60
STARTING_AT_ONCE = 16


class End:
    """A container that runs one program and ends with it; its address is chosen here, so nobody has to ask."""

    def __init__(self, host, name, number, directory, words):
        self.ip = f"10.111.{host.number}.{number}"
        shared = ["-v", f"{directory}:{directory}"]
        self.running = Running(host.command("run", "--rm", "--name", name, "--ip", self.ip, *shared, "--", *words))

    def flows(self):
        """Requests of each queue pair."""
        lines = [line.split() for line in self.running.output().splitlines()]
        return [int(line[2]) for line in lines if line[:1] == ["flow"]]


class Crowd:
    """Pairs of containers that begin together once all are connected."""

    def __init__(self, options):
        # A volume of theirs: a container may not see what the host makes later in a file system that it has an overlay over.
        self.directory = tempfile.TemporaryDirectory(prefix="freeflow-many.", dir="/var/tmp")
        self.go = pathlib.Path(self.directory.name) / "go"
        self.options = ["-g", self.go, *options]
        self.ends = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.ends:
            end.running.kill()
        self.directory.cleanup()

    def add(self, server, client, name, number, port):
        """A server on one host and its client on another; at most a few pairs are being started at any time."""
        wire = harness.program("wire")
        there = End(server, f"{name}-server", number, self.directory.name, [wire, *self.options, "server", port])
        self.ends.append(there)
        self.ends.append(End(client, f"{name}-client", number + 1, self.directory.name, [wire, *self.options, "client", there.ip, port]))
        if len(self.ends) > STARTING_AT_ONCE:
            self.ends[-STARTING_AT_ONCE].running.wait_for_output("ready", READY_SECONDS)

    def run(self):
        """All flows from the same moment on; gives each one's requests, by container."""
        for end in self.ends:
            end.running.wait_for_output("ready", READY_SECONDS)
        self.go.touch()
        flows = []
        for end in self.ends:
            code = end.running.wait(END_SECONDS)
            need(code == 0 and "all right" in end.running.output(), f"exit code {code}:\n{end.running.output()}")
            flows.append(end.flows())
        return flows


def fair(flows, count):
    """Every flow moved, and none stood while the others ran: the figures for fairness are `make bench`'s."""
    need(len(flows) == count, f"{len(flows)} flows instead of {count}")
    mean = sum(flows) / len(flows)
    need(min(flows) * 20 > mean, f"starved: the least of {count} flows made {min(flows)} requests, the mean {mean:.0f}")
    jain = sum(flows) ** 2 / (len(flows) * sum(flow * flow for flow in flows))
    return f"{sum(flows)} requests; least {min(flows)}, mean {mean:.0f}, Jain's index {jain:.3f}"


def all_to_all(lab):
    with Crowd(["-q", 4, "-t", ALL_TO_ALL_MS]) as crowd:
        pairs = [(server, client) for server in lab.hosts for client in lab.hosts]
        for server, client in pairs:
            number = 2 + 2 * (server.number * 10 + client.number)
            crowd.add(server, client, f"all{server.number}{client.number}", number, PORT)
        flows = crowd.run()
    # Within a host too: its containers meet without packets, at the same time, and faster.
    flows = [(pair[0] is pair[1], flow) for end, pair in enumerate(pairs) for own in flows[2 * end:2 * end + 2] for flow in own]
    within, between = ([flow for is_within, flow in flows if is_within == wanted] for wanted in (True, False))
    return f"between hosts {fair(between, 2 * 6 * 4)}; within {fair(within, 2 * 3 * 4)}"


def many(lab):
    servers, clients = lab.hosts[:2]
    with Crowd(["-q", QPS, "-t", MANY_MS]) as crowd:
        for pair in range(PAIRS):
            crowd.add(servers, clients, f"many{pair}", 2 + 2 * pair, PORT)
        flows = crowd.run()
    return fair([flow for own in flows for flow in own], 2 * PAIRS * QPS)


@pytest.fixture(scope="module")
def lab():
    with Lab(3, MTU) as lab:
        lab.wait_for_peers()
        yield lab


@pytest.fixture(scope="module", autouse=True)
def before(lab):
    return [harness.router_resources(host) for host in lab.hosts]


def test_three_hosts_all_to_all(lab):
    all_to_all(lab)


def test_many_pairs_with_several_queue_pairs_each(lab):
    many(lab)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_nothing_is_left_in_router(lab, before, number):
    harness.wait_for_resources(lab.host(number), before[number - 1])
