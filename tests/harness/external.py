"""A container and a guest with Linux's Soft-RoCE that are each other's peers, in a network namespace of the test's."""

import contextlib
import ipaddress
import json
import os
import pathlib
import re
import tempfile

from harness import namespaces, rxe_guest
from harness.failure import need
from harness.processes import run

HOST, GUEST, STRANGER = "192.168.241.1", "192.168.241.2", "192.168.241.3"
HOST6, GUEST6 = "fd00:241::1", "fd00:241::2"
PACKAGES_SECONDS = 300
# Of the interface, bytes: the largest with which rxe's path MTU is so, and room for all headers.
INTERFACE_MTU = {1024: 1500, 4096: 4200}


class Ends:
    """The container and the guest, and who has which GID index for what."""

    def __init__(self, host, guest, container, guest_index=None):
        self.host, self.guest, self.container = host, guest, container
        self.index = {container: 1, guest: guest_index or gid_index(guest, f"::ffff:{GUEST}")}
        self.mtu = None

    def set_mtu(self, mtu):
        if self.mtu != mtu:
            self.guest.exec("ip", "link", "set", "dev", "eth0", "mtu", INTERFACE_MTU[mtu])
            need(f"active_mtu:\t\t{mtu}" in self.guest.exec("ibv_devinfo"), f"rxe does not take an MTU of {mtu}")
            self.mtu = mtu

    def order(self, container_serves):
        return (self.container, self.guest) if container_serves else (self.guest, self.container)


def full(address):
    """A GID as sysfs writes it."""
    return ipaddress.ip_address(address).exploded


def gid_index(guest, address):
    table = guest.exec("sh", "-c", "cd /sys/class/infiniband/rxe0/ports/1/gids; grep . * 2>/dev/null")
    found = re.search(rf"^(\d+):{full(address)}$", table, re.MULTILINE)
    need(found, f"rxe has no GID {address}:\n{table}")
    return int(found[1])


def peers_file(directory, address, external):
    """For a host that has no peers but external ones."""
    key = directory / "host.key"
    key.touch(0o600)
    key.write_text(os.urandom(32).hex() + "\n")
    path = directory / "peers.json"
    path.write_text(json.dumps({"host": "h1", "address": address, "key_file": str(key), "peers": [], "external": external}))
    return path


@contextlib.contextmanager
def surroundings(addresses, gateways, seconds):
    """The guest, which still boots, and a folder. Containers reach it through a network namespace of this thread's."""
    run([rxe_guest.SCRIPT, "--packages"], PACKAGES_SECONDS)  # what can only be done where the network still is
    with tempfile.TemporaryDirectory(prefix="freeflow-external.") as directory, namespaces.own("net"):
        run(["ip", "link", "set", "dev", "lo", "up"])
        pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        with rxe_guest.Guest(addresses, gateways, seconds) as guest:
            yield guest, pathlib.Path(directory)
