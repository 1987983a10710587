"""The vNIC of a virtual machine, without the machine: see tests/harness/vm.py."""

import json
import os
import time

import pytest

import harness
from harness import cm, in_two_containers, need, statuses, vm
from harness.perftest import one

SECRET = b"a secret of the first boot"


@pytest.fixture(scope="module")
def guest(host):
    guest = vm.Guest(host, "machine")
    guest.boot()
    yield guest
    guest.remove()


@pytest.fixture(params=("from the guest", "to the guest"))
def ends(request, guest, container):
    """A server and a client."""
    return (container, guest) if request.param == "from the guest" else (guest, container)


def test_device(guest, host):
    output = guest.exec("ibv_devinfo", "-v")
    need("freeflow0" in output and "PORT_ACTIVE" in output, output)
    need(guest.address in host.freeflow("vm", "ls") and guest.name in host.freeflow("vm", "ls"), "it is not listed")
    again = host.freeflow("vm", "attach", "machine", "--size", vm.SIZE)
    need(f"mem-path={guest.memory}" in again and f"path={guest.control},reconnect=1" in again, again)
    host.freeflow("vm", "attach", "machine", "--size", "128M", codes=(1,))


@pytest.mark.parametrize("words", ("ibv_rc_pingpong", "ibv_rc_pingpong -e", "ibv_uc_pingpong", "ibv_ud_pingpong -e",
                                   "ibv_srq_pingpong", "ibv_rc_pingpong -s 1048576 -n 50"))
def test_pingpong(ends, words):
    words = [*words.split(), "-g", "0"]
    output = "".join(in_two_containers(*ends, words, [*words, "{ip}"]))
    need(output.count("iters in") == 2, output)


@pytest.mark.parametrize("words", ("ib_write_bw -n 500", "ib_read_bw -n 500", "ib_send_bw -n 500 -e", "ib_write_lat -n 500",
                                   "ib_send_lat -n 500 -e", "ib_atomic_bw -n 500"))
def test_perftest(ends, tmp_path, words):
    one(*ends, [*words.split(), "-F"], tmp_path)


@pytest.mark.parametrize("server_is_guest", (False, True))
def test_rdma_cm(guest, container, server_is_guest):
    server, client = (guest, container) if server_is_guest else (container, guest)
    address = guest.address if server_is_guest else container.ip
    cm.run_row(server, client, cm.Row.of(f"rping -s -a {address} -C 10 -V", f"rping -c -a {address} -C 10 -V"))


def test_every_request_and_its_errors(ends):
    """tests/programs/statuses.c: each kind of request, each way in which one fails; bytes are compared."""
    names = statuses.names()
    report = statuses.in_two(*ends, names)
    for name in names:
        report.check(name)


def test_two_processes_of_the_guest(guest):
    words = ["ibv_rc_pingpong", "-g", "0"]
    in_two_containers(guest, guest, words, [*words, "127.0.0.1"])


def test_nothing_goes_past_the_router(guest, container, host):
    words = ["ib_write_bw", "-D", "60", "-F"]
    server = container.start(*words)
    container.wait_for_port(server, 18515)
    client = guest.start(*words, container.ip)
    cm.wait_until(lambda: "virtual machine" in host.freeflow("ps", "--qps"), lambda: host.freeflow("ps", "--qps"), 30)
    client.kill()
    server.kill()


def test_a_killed_program(guest, container, held_by_all):
    server = container.start("ib_send_bw", "-D", "60", "-F")
    container.wait_for_port(server, 18515)
    client = guest.start("ib_send_bw", "-D", "60", "-F", container.ip)
    guest.wait_for_sessions(1)
    time.sleep(0.3)
    client.kill()
    guest.wait_for_sessions(0)
    server.kill()
    harness.wait_for_resources(guest.host, held_by_all)


@pytest.fixture
def held_by_all(guest, host):
    """Once nothing of an earlier test is left."""
    guest.wait_for_sessions(0)
    return harness.router_resources(host)


def test_a_killed_agent_and_the_next_boot(guest, container, held_by_all):
    server = container.start("ib_write_bw", "-D", "60", "-F")
    container.wait_for_port(server, 18515)
    client = guest.start("ib_write_bw", "-D", "60", "-F", container.ip)
    guest.wait_for_sessions(1)
    with open(guest.memory, "r+b") as memory:
        memory.seek(vm.SIZE_BYTES - 4096)
        memory.write(SECRET)
    guest.agent.kill()
    guest.wait_for_sessions(0)
    need(client.wait(20) != 0, "a program did not notice the end of its agent:\n" + client.output())
    server.kill()
    guest.end()
    guest.boot()
    with open(guest.memory, "rb") as memory:
        memory.seek(vm.SIZE_BYTES - 4096)
        need(memory.read() == bytes(4096), "the next boot can read what the first had")
    need(guest.pages() < 4 << 20, f"{guest.pages()} bytes of the device are there")
    words = ["ibv_rc_pingpong", "-g", "0"]
    in_two_containers(container, guest, words, [*words, "{ip}"])
    harness.wait_for_resources(guest.host, held_by_all)


def test_a_new_agent_while_the_old_one_is_there(guest):
    """Of a reboot that did not close the port: the next agent waits for the end of what was, and then is served."""
    first, namespace = guest.agent, guest.namespace
    guest.boot(wait=False)
    time.sleep(0.5)
    need("serving" not in guest.agent.output(), "two agents of one vNIC")
    first.kill()
    guest.wait_until_served()
    namespace.kill()
    need("freeflow0" in guest.exec("ibv_devinfo"), "the second agent serves nothing")


def test_an_agent_that_hangs(guest, container):
    """Silence of three seconds ends all that was; nobody else is disturbed."""
    server = container.start("ib_write_bw", "-D", "60", "-F")
    container.wait_for_port(server, 18515)
    guest.start("ib_write_bw", "-D", "60", "-F", container.ip)
    guest.wait_for_sessions(1)
    agent = int(guest.exec("pgrep", "-f", f"freeflow-guest --device {guest.memory}").split()[0])
    os.kill(agent, 19)
    guest.wait_for_sessions(0, seconds=20)
    words = ["ibv_rc_pingpong", "-g", "0"]
    in_two_containers(container, container, words, [*words, "127.0.0.1"])
    os.kill(agent, 18)
    guest.agent.wait_for_output("trying again")
    guest.end()
    guest.boot()


def test_the_router_is_killed(guest, container, host):
    waiting = guest.start("ib_send_bw", "-F")
    guest.wait_for_sessions(1)
    harness.end_router(host)
    host.up()
    end = time.monotonic() + 20
    while guest.agent.output().count("serving") < 2:
        need(time.monotonic() < end, guest.agent.output())
        time.sleep(0.05)
    waiting.kill()
    need("freeflow0" in guest.exec("ibv_devinfo"), "no device after the router's end")


def test_detached(host, container):
    guest = vm.Guest(host, "gone")
    guest.boot()
    guest.start("ib_send_bw", "-F")
    guest.wait_for_sessions(1)
    host.freeflow("vm", "detach", "gone")
    need(not os.path.exists(guest.memory) and not os.path.exists(guest.control), "its files are there")
    need("gone" not in host.freeflow("vm", "ls"), "it is listed")
    guest.end()
    guest.cable.remove()
    host.freeflow("vm", "detach", "gone", codes=(1,))


def test_a_device_that_does_not_fit_leaves_nothing(host):
    """The address that it asked for is the next one's."""
    address = json.loads(host.freeflow("vm", "attach", "small", "--size", "16M", "-o", "json"))["address"]
    host.freeflow("vm", "detach", "small")
    host.freeflow("vm", "attach", "large", "--size", "1024G", "--address", address, codes=(1,))
    need("large" not in host.freeflow("vm", "ls"), "it is listed")
    host.freeflow("vm", "attach", "small", "--size", "16M", "--address", address)
    host.freeflow("vm", "detach", "small")


def test_a_device_that_can_not_be_had_holds_up_no_router(host):
    memory = json.loads(host.freeflow("vm", "attach", "lost", "--size", "16M", "-o", "json"))["memory"]
    # As if it were another user's.
    os.chmod(os.path.realpath(memory), 0o644)
    harness.end_router(host)
    host.up()
    need(host.is_up() and "lost" in host.freeflow("vm", "ls"), "the router does not start")
    host.freeflow("vm", "detach", "lost")


def test_down():
    """A host that is taken down leaves no file of a device, also where its run directory is on a disk."""
    with harness.Host() as other:
        guest = vm.Guest(other, "left")
        guest.boot()
        memory = os.path.realpath(guest.memory)
        need(os.path.getsize(memory) == vm.SIZE_BYTES, "the device has another size")
        guest.end()
    need(not os.path.exists(memory), f"{memory} is left")
