"""Enemies in one container; a healthy pair in two others, of which no request may fail, and a router that must hold."""

import os

import pytest

import harness
from harness import PORT, enemies, need
from harness.enemies import beside

BAD_MEMORY = ("uffd", "uffd-user", "truncated", "unmapped", "unreadable")
# Re-mapping leaves these alone. (What is placed outlives its unmapping, as pinned pages do.)
NEVER_PLACED = ("uffd", "uffd-user", "truncated")
NOT_HERE = 77


def bad_memory(owner, user, kind, remap):
    program = harness.program("bad_memory")
    # Off: the owner's memory stays where it is, for this is about the slow path.
    server = ["env", f"FREEFLOW_REMAP={remap}", program, kind, "server", PORT]
    client = [program, kind, "client", "{ip}", PORT]
    running = owner.start(*server)
    owner.wait_for_port(running)
    output = user.exec(*[word.replace("{ip}", owner.ip) if word == "{ip}" else word for word in client],
                       codes=(0, NOT_HERE))
    code = running.wait(30)
    if code == NOT_HERE:
        return f"not to be had here: {running.output().strip()}"
    need(code == 0, f"the owner gave {code}:\n{running.output()}\n--- the user printed:\n{output}")
    return f"{output.count(kind)} + {running.output().count(kind)} answers"


def files_that_change(container, program, name):
    need(f"{name}: good" in container.exec("env", "REMAP_SECONDS=3", program, name, seconds=60), name)


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
    harness.in_two_containers(server, client, [load, "-t", 1, "server", PORT],
                          [load, "-t", 1, "client", "{ip}", PORT])


@pytest.fixture(scope="module")
def healthy(host):
    return enemies.Healthy(host, harness.program("load"))


@pytest.fixture(scope="module")
def user(host, healthy):
    return host.container("user")


@pytest.fixture(scope="module")
def owner(host, healthy):
    """It may have userfaultfd, which a container gets only where its owner says so."""
    device = "/dev/userfaultfd"
    return host.container("owner", *(["-v", f"{device}:{device}"] if os.path.exists(device) else []))


@pytest.mark.parametrize("what, counter", [("messages", "malformed_messages"), ("rings", "malformed_descriptors")])
def test_enemy_beside_a_healthy_pair(host, healthy, held, what, counter):
    """Control messages that are nonsense; its own rings full of it."""
    enemy = host.container("enemy")
    try:
        beside(healthy, enemies.enemy, host, enemy, harness.program("hostile"), what, counter)
    finally:
        enemy.remove()


def test_things_of_other_containers_are_out_of_reach(host, healthy, held, owner):
    escape(healthy, owner, harness.program("escape"), host)


@pytest.mark.parametrize("kind", BAD_MEMORY)
def test_bad_memory_does_not_harm_others(healthy, held, owner, user, kind):
    beside(healthy, bad_memory, owner, user, kind, "off")


@pytest.mark.parametrize("kind", NEVER_PLACED)
def test_bad_memory_with_remapping(healthy, held, owner, user, kind):
    beside(healthy, bad_memory, owner, user, kind, "on")


@pytest.mark.parametrize("name", ["borrowed-storm", "borrowed-swapped"])
def test_files_that_change_under_their_regions(healthy, held, owner, name):
    """A file is cut, punched and grows while a peer writes there; a mapping is swapped for one to be read only."""
    beside(healthy, files_that_change, owner, harness.program("remap"), name)


def test_new_programs_work(healthy, held, user):
    alive_after(harness.program("load"), user, healthy.client)


def test_nothing_is_left_in_the_router(host, healthy, held, owner, user):
    owner.remove()
    user.remove()
    harness.wait_for_resources(host, held)
