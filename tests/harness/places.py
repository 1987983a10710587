"""Two containers for others' programs: on one host, direct and routed, and on two; idle or beside a load."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile

from harness import paths, settings
from harness.failure import need
from harness.host import Host
from harness.lab import Lab
from harness.processes import Running
from harness.resources import router_resources

ONE_OR_TWO = ("one host", "two hosts")
WHERE = ("one host", "routed", "two hosts")
LOADS = ("idle", "loaded")


@dataclasses.dataclass
class Place:
    """Two containers that know each other by name, and the hosts under them."""

    pair: tuple
    hosts: list

    def messages(self):
        """Bytes that went over verbs, on whatever path."""
        counters = [host.status()["counters"] for host in self.hosts]
        return sum(each["messages"] + each["direct_messages"] for each in counters)


@dataclasses.dataclass
class Ends:
    """A server and a client, each on its own host where there are two, and a third container beside the client."""

    where: str
    hosts: list
    server: object
    client: object
    third: object
    held: list  # what each router held before


@contextlib.contextmanager
def ends(where, mtu=4200):
    with contextlib.ExitStack() as stack:
        if where == "two hosts":
            lab = stack.enter_context(Lab(2, mtu))
            lab.wait_for_peers()
            hosts, (server, client) = lab.hosts, lab.pair()
        else:
            hosts = [stack.enter_context(Host())]
            server, client = hosts[0].pair()
        third = hosts[-1].container("three")
        yield Ends(where, hosts, server, client, third, [router_resources(host) for host in hosts])


@contextlib.contextmanager
def place(where):
    with tempfile.TemporaryDirectory(prefix="freeflow-place.") as directory:
        hosts_file = pathlib.Path(directory) / "hosts"
        if where == "two hosts":
            with Lab(2, 4200) as lab:
                lab.wait_for_peers()
                yield Place(pair(*lab.hosts, hosts_file), lab.hosts)
        else:
            with Host() as host:
                if where == "routed":
                    need(paths.set_path(host, "routed"), "the router does not take the data path")
                yield Place(pair(host, host, hosts_file), [host])


def pair(first, second, hosts_file):
    """A container on each. Launchers look their own host's name up, and would wait for a name server
    that isn't there."""
    hosts_file.write_text("")
    options = ("-v", f"{hosts_file}:/etc/hosts")
    containers = first.container("one", *options), second.container("two", *options)
    lines = ["127.0.0.1 localhost", *(f"{container.ip} {container.name}" for container in containers)]
    hosts_file.write_text("".join(f"{line}\n" for line in lines))
    return containers


class Load:
    """Twice as many busy loops as there are processors, a little nicer than others, for a bounded time."""

    def __init__(self):
        self.seconds = 3600 if settings.FULL else 600

    def __enter__(self):
        loop = ["nice", "-n", "1", "timeout", str(self.seconds), "sh", "-c", "while :; do :; done"]
        self.loops = [Running(loop) for _ in range(2 * len(os.sched_getaffinity(0)))]
        return self

    def __exit__(self, *_):
        for loop in self.loops:
            loop.kill()
