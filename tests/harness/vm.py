"""A virtual machine's vNIC without the machine: the guest agent runs in a mount namespace of this host, with the router's
file as its shared-memory device and the router's socket as its control channel.

A `Guest` is used as a container is: programs run in its namespace, where `/run/freeflow` is the agent's.
"""

import json
import os
import secrets
import time

from harness import settings
from harness.failure import need
from harness.host import Container
from harness.processes import Running, run

SIZE = "1G"
SIZE_BYTES = 1 << 30


def agent_path():
    path = settings.DIST / "bin" / "freeflow-guest"
    need(path.exists(), f"{path} is not built: run `make`")
    return path


class Guest(Container):
    """`boot` makes a namespace and begins the agent in it; `end` ends both."""

    def __init__(self, host, name, size=SIZE):
        self.host, self.name, self.background = host, name, []
        self.vnic = json.loads(host.freeflow("vm", "attach", name, "--size", size, "-o", "json"))
        self.memory, self.control = self.vnic["memory"], self.vnic["control"]
        self.address = self.vnic["address"]
        # Programs tell each other by plain IP where they are: the guest's network is a container's.
        self.cable = host.container(f"{name}-cable")
        self.ip = self.cable.ip
        self.namespace = self.agent = None

    def boot(self, wait=True):
        """Another boot of the guest's kernel: another namespace, another name."""
        script = "mount --make-rprivate / && mount -t tmpfs none /run && mkdir /run/freeflow && echo made && exec sleep infinity"
        self.namespace = Running(["nsenter", "--net", f"--target={self.cable.pid}", "--", "unshare", "--mount", "sh", "-c", script])
        self.namespace.wait_for_output("made")
        self.pid = self.namespace.process.pid
        self.begin_agent(secrets.token_hex(16))
        if wait:
            self.wait_until_served()

    def begin_agent(self, boot):
        # Its own copy of a program that is written anew is not this one's.
        self.agent = Running(self.command(agent_path(), "--device", self.memory, "--control", self.control, "--boot", boot))

    def wait_until_served(self, seconds=20):
        self.agent.wait_for_output("serving /run/freeflow/router.sock", seconds)

    def command(self, *command):
        return ["nsenter", "--mount", "--net", f"--target={self.pid}", "--",
                "env", f"LD_LIBRARY_PATH={settings.DIST / 'lib'}", *map(str, command)]

    def exec(self, *command, seconds=60, codes=(0,)):
        return run(self.command(*command), seconds, codes=codes)

    def sessions(self):
        rows = json.loads(self.host.freeflow("vm", "ls", "-o", "json"))
        return next(row["sessions"] for row in rows if row["name"] == self.name)

    def wait_for_sessions(self, count, seconds=10):
        end = time.monotonic() + seconds
        while self.sessions() != count:
            need(time.monotonic() < end, f"{self.sessions()} sessions, not {count}: {self.host.router_log()}")
            time.sleep(0.02)

    def pages(self):
        """Bytes of the device's file that are there."""
        return os.stat(self.memory).st_blocks * 512

    def end(self):
        self.kill_background()
        for running in (self.agent, self.namespace):
            if running:
                running.kill()
        self.agent = self.namespace = None

    def remove(self):
        self.end()
        self.host.freeflow("vm", "detach", self.name)
        self.cable.remove()


def frame(body):
    return len(body).to_bytes(4, "little") + bytes(body)


# Messages as the protocol has them: crates/protocol/src/guest.rs, encoded by postcard.
PREAMBLE = b"freeflow-guest-1"


def varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number):
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def begin(versions=(1, 1)):
    return frame(b"\x00" + varint(versions[0]) + varint(versions[1]) + varint(0) + varint(0) + bytes(range(16)))


def ready(offset, length):
    return frame(b"\x01" + varint(offset) + varint(length))


def connect(connection, pid=1, uid=0, gid=0):
    return frame(b"\x02" + varint(connection) + zigzag(pid) + varint(uid) + varint(gid))


def request(connection, body):
    return frame(b"\x03" + varint(connection) + varint(len(body)) + bytes(body))


def close(connection):
    return frame(b"\x04" + varint(connection))


def kick(connection):
    return frame(b"\x05" + varint(connection))


def near(body):
    return frame(b"\x06" + bytes(body))


HEARTBEAT = frame(b"\x07")
