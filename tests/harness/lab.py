"""Several hosts on this machine, with a network between them."""

import json
import os
import shutil
import signal
import sys
import time

from harness import settings
from harness.failure import Failure, need
from harness.host import Host, RunDirectory, router_of


class LabHost(Host):
    """One host of a Lab: everything that a Host is, in a network of its own."""

    def __init__(self, lab, number):  # the lab has brought it up
        self.lab, self.number = lab, number
        self.freeflow_path = lab.freeflow_path
        self.run_dir = lab.path / f"host{number}"
        self.up_options = ()
        self.pids = {self.router_pid()}
        Host.current.append(self)
        self.choose_path()

    def enter(self, *words):
        """The command that runs a program in the host's own network, outside of any container."""
        return self.lab.command("lab", "enter", "--host", self.number, "--", *words)

    def wire(self):
        """The router's status of packets to and from other hosts."""
        return json.loads(self.freeflow("wire", "status", "-o", "json"))

    def close(self):
        self.lab.close()


class Lab(RunDirectory):
    """Several hosts on this machine; `pair` gives containers on the first two, as a Host gives two of its own."""

    def __init__(self, hosts=2, mtu=1500, *up_options):
        self.begin()
        self.path = self.run_dir / "labs" / "lab"
        self.hosts = []
        try:
            self.freeflow("lab", "up", "--hosts", hosts, "--mtu", mtu, *settings.up_options(up_options))
            for number in range(1, hosts + 1):
                self.hosts.append(LabHost(self, number))
        except BaseException:
            self.close()
            raise

    def host(self, number):
        """Numbered from 1, as the command does."""
        return self.hosts[number - 1]

    def pair(self):
        return self.host(1).container("one"), self.host(2).container("two")

    def status(self):
        return json.loads(self.freeflow("lab", "status", "-o", "json"))

    def wait_for_peers(self, seconds=20):
        """Until every router is connected with every other."""
        end = time.monotonic() + seconds
        for host in self.hosts:
            while any(peer["state"] != "up" for peer in json.loads(host.freeflow("peers", "ls", "-o", "json"))["peers"]):
                need(time.monotonic() < end, f"host {host.number} does not reach the others")
                time.sleep(0.02)

    def cut(self, number):
        self.freeflow("lab", "cut", "--host", number)

    def heal(self, number):
        self.freeflow("lab", "heal", "--host", number)

    def close(self):
        """Removes everything, by force where the orderly way fails."""
        if self.directory is None:
            return
        for host in self.hosts:
            if host in Host.current:
                Host.current.remove(host)
            host.stop_switch()
        directory, self.directory = self.directory, None
        self.note_refused_calls()  # the logs go with their hosts
        try:
            self.freeflow("lab", "down", "--force", seconds=60)
        except Failure as failure:
            print(f"  the lab did not go down: {failure}", file=sys.stderr)
            for pid in {pid for host in self.hosts for pid in host.pids}:
                if router_of(pid, self.run_dir):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
