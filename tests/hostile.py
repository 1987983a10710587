#!/usr/bin/env python3
"""Enemies in one container; a healthy pair in two others, of which no request may fail, and a router that must hold."""

import os

import lib
from lib import need

SECONDS = 60 if lib.FULL else 10
BAD_MEMORY = ("uffd", "uffd-user", "truncated", "unmapped", "unreadable")
# Re-mapping leaves these alone. (What is placed outlives its unmapping, as pinned pages do.)
NEVER_PLACED = ("uffd", "uffd-user", "truncated")
NOT_HERE = 77


class Healthy:
    """Traffic beside whatever goes on; `stop` says whether it was disturbed."""

    def __init__(self, host, load):
        self.host, self.load = host, load
        self.server, self.client = host.container("healthy1"), host.container("healthy2")

    def start(self):
        self.there = self.server.start(self.load, "server", lib.PORT)
        self.server.wait_for_port(self.there)
        self.here = self.client.start(self.load, "-e", "client", self.server.ip, lib.PORT)
        self.pid = self.host.router_pid()
        return self.there.wait_for_output("ready").split()[1:4]

    def stop(self):
        self.here.terminate()
        for side in (self.here, self.there):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"the healthy pair was disturbed ({code}):\n{side.output()}")
        need(self.host.router_pid() == self.pid, "the router died and was started again")
        need(lib.router_of(self.pid, self.host.run_dir), "the router died")
        return self.here.output().strip().splitlines()[-1]


def beside(healthy, function, *arguments):
    """The function's note, and what the healthy pair did meanwhile."""
    healthy.start()
    try:
        note = function(*arguments)
    except BaseException:
        healthy.here.kill()
        healthy.there.kill()
        raise
    return f"{note}; beside it {healthy.stop()}"


def enemy(host, container, hostile, what, counter):
    """The router's own counter must show that it met nonsense, else the enemy was none."""
    before = host.status()["counters"][counter]
    note = container.exec(hostile, what, lib.SEED, SECONDS, seconds=SECONDS + 30).strip().splitlines()[-1]
    met = host.status()["counters"][counter] - before
    need(met > 0, f"{note}, but the router counted no {counter}")
    return f"{note}, {met} {counter}"


def bad_memory(checks, healthy, owner, user, program, kind, remap):
    def attempt():
        # Off: the owner's memory stays where it is, for this is about the fallback.
        server = ["env", f"FREEFLOW_REMAP={remap}", program, kind, "server", lib.PORT]
        client = [program, kind, "client", "{ip}", lib.PORT]
        running = owner.start(*server)
        owner.wait_for_port(running)
        output = user.exec(*[word.replace("{ip}", owner.ip) if word == "{ip}" else word for word in client],
                           codes=(0, NOT_HERE))
        code = running.wait(30)
        if code == NOT_HERE:
            return f"not to be had here: {running.output().strip()}"
        need(code == 0, f"the owner gave {code}:\n{running.output()}\n--- the user printed:\n{output}")
        return f"{output.count(kind)} + {running.output().count(kind)} answers"

    checks.check(f"memory that is {kind}{'' if remap == 'off' else ', re-mapping on'}", beside, healthy, attempt)


def escape(healthy, container, program, host):
    victim = healthy.start()
    try:
        output = container.exec(program, host.run_dir, healthy.server.pid, healthy.server.ip, *victim)
        need(", 0 failed" in output, output)
        note = output.strip().splitlines()[-1]
    except BaseException:
        healthy.here.kill()
        healthy.there.kill()
        raise
    return f"{note}; beside it {healthy.stop()}"


def alive_after(load, server, client):
    """Containers that meddled may have lost their own vNIC; a new container has not."""
    lib.in_two_containers(server, client, [load, "-t", 1, "server", lib.PORT],
                          [load, "-t", 1, "client", "{ip}", lib.PORT])


def test(checks):
    load, hostile = lib.program("load"), lib.program("hostile")
    with lib.Host() as host:
        healthy = Healthy(host, load)
        before = lib.router_resources(host)
        enemies = host.container("enemy")
        checks.check(f"control messages, seed {lib.SEED}", beside, healthy, enemy, host, enemies, hostile, "messages",
                     "malformed_messages")
        enemies.remove()
        enemies = host.container("enemy2")
        checks.check(f"its own rings, seed {lib.SEED}", beside, healthy, enemy, host, enemies, hostile, "rings",
                     "malformed_descriptors")
        enemies.remove()
        userfaultfd = "/dev/userfaultfd"  # a container gets it only where its owner says so
        enemies = host.container("enemy3", *(["-v", f"{userfaultfd}:{userfaultfd}"] if os.path.exists(userfaultfd) else []))
        checks.check("another container's things", escape, healthy, enemies, lib.program("escape"), host)
        user = host.container("user")
        for kind in BAD_MEMORY:
            bad_memory(checks, healthy, enemies, user, lib.program("bad_memory"), kind, "off")
        for kind in NEVER_PLACED:
            bad_memory(checks, healthy, enemies, user, lib.program("bad_memory"), kind, "on")
        enemies.remove()
        checks.check("new programs work", alive_after, load, user, healthy.client)
        user.remove()
        checks.check("nothing is left in the router", lib.wait_for_resources, host, before)


if __name__ == "__main__":
    lib.main(test)
