"""A virtual machine whose agent is an enemy: whatever it sends ends its own stream at most."""

import os
import random
import socket
import time

import pytest

import harness
from harness import in_two_containers, need, vm
from harness.settings import SEED

U64 = (1 << 64) - 1


class Enemy:
    """The end of a control channel, by hand."""

    def __init__(self, guest):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(guest.control)

    def say(self, *parts):
        for part in parts:
            self.socket.sendall(part)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def is_ended(self):
        """Reads until the router closes; False: it did not within the time."""
        end = time.monotonic() + 10
        try:
            while self.socket.recv(1 << 16):
                if time.monotonic() > end:
                    return False
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def begin(self):
        """To where the router serves it."""
        self.say(vm.PREAMBLE, vm.begin())
        self.wait_for(b"\x00")  # Cleared
        self.say(vm.ready(0, vm.SIZE_BYTES))
        self.wait_for(b"\x02")  # Serve
        return self

    def wait_for(self, kind):
        """The next message of this kind, which is no sign of life."""
        while True:
            if not getattr(self, "skipped", False):
                need(self.exactly(len(vm.PREAMBLE)) == vm.PREAMBLE, "no preamble")
                self.skipped = True
            body = self.exactly(int.from_bytes(self.exactly(4), "little"))
            if body[:1] == kind:
                return body
            need(body[:1] == b"\x06", f"the router said {body!r}")

    def exactly(self, count):
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            need(piece, "the router has closed the stream")
            data += piece
        return data


@pytest.fixture(scope="module")
def guest(host):
    guest = vm.Guest(host, "enemy")
    yield guest
    guest.remove()


@pytest.fixture(scope="module", autouse=True)
def undisturbed(host, guest, pair):
    """In the end others' programs go on, the router holds no more than before, and the vNIC serves an honest agent."""
    held, router = harness.router_resources(host), host.router_pid()
    yield
    need(host.router_pid() == router and host.is_up(), "the router has ended")
    words = ["ibv_rc_pingpong", "-g", "0"]
    in_two_containers(*pair, words, [*words, "{ip}"])
    guest.boot()
    need("freeflow0" in guest.exec("ibv_devinfo"), "an honest agent is not served")
    guest.end()
    guest.wait_for_sessions(0)
    harness.wait_for_resources(host, held)


BEFORE = {
    "another release": [vm.PREAMBLE, vm.begin((2, 9))],
    "ready before it is cleared": [vm.PREAMBLE, vm.ready(0, 4096)],
    "a library before it is served": [vm.PREAMBLE, vm.begin(), vm.connect(1)],
    "begun twice": [vm.PREAMBLE, vm.begin(), vm.begin()],
    "a preamble in the middle": [vm.PREAMBLE, vm.begin(), vm.PREAMBLE],
    "a frame that is too long": [vm.PREAMBLE, (1 << 24).to_bytes(4, "little")],
    "an empty frame": [vm.PREAMBLE, vm.frame(b"")],
    "no message": [vm.PREAMBLE, vm.frame(b"\xff\xff\xff")],
    "bytes after a message": [vm.PREAMBLE, vm.frame(b"\x07\x00")],
    "a message that is cut": [vm.PREAMBLE, vm.frame(vm.begin()[4:-1])],
}


@pytest.mark.parametrize("case", BEFORE)
def test_before_it_is_served(guest, case):
    with Enemy(guest) as enemy:
        enemy.say(*BEFORE[case])
        need(enemy.is_ended(), "the stream goes on")


@pytest.mark.parametrize("data", ((0, 0), (0, vm.SIZE_BYTES + 4096), (4096, vm.SIZE_BYTES), (vm.SIZE_BYTES, 4096), (1, 4096),
                                  (0, 4097), (U64 - 4095, 4096), (U64, U64), (4096, U64 - 4095), (0, 4096)))
def test_data_that_the_device_has_not(guest, data):
    with Enemy(guest) as enemy:
        enemy.say(vm.PREAMBLE, vm.begin())
        enemy.wait_for(b"\x00")
        enemy.say(vm.ready(*data))
        need(b"data" in enemy.wait_for(b"\x01") or data == (0, 4096), "another reason")
        need(enemy.is_ended(), "the stream goes on")


SERVED = {
    "a number twice": [vm.connect(1), vm.connect(1)],
    "a smaller number": [vm.connect(7), vm.connect(3)],
    "number 0": [vm.connect(0)],
    "a number that is a mark": [vm.connect(1 << 62)],
    "the largest number": [vm.connect(U64)],
    "no process": [vm.connect(1, pid=0)],
    "a process before all": [vm.connect(1, pid=-1)],
    "two requests at once": [vm.connect(1), vm.request(1, b"\x01"), vm.request(1, b"\x01")],
    "an empty request": [vm.connect(1), vm.request(1, b"")],
    "an answer that nobody wants": [vm.near(b"\x00" + vm.varint(U64) + b"\x00\x00")],
    "an event taken that none was": [vm.connect(1), vm.near(b"\x02\x00"), vm.near(b"\x00\x09\x00\x00")],
    "begun again": [vm.begin()],
    "ready again": [vm.ready(0, 4096)],
}


@pytest.mark.parametrize("case", SERVED)
def test_while_it_is_served(guest, case):
    with Enemy(guest) as enemy:
        enemy.begin()
        enemy.say(*SERVED[case])
        need(enemy.is_ended(), "the stream goes on")


def test_numbers_that_name_nothing(guest):
    """They are passed over: what they named may have gone meanwhile."""
    with Enemy(guest) as enemy:
        enemy.begin()
        for number in (0, 1, 5, U64):
            enemy.say(vm.request(number, b"\x01"), vm.close(number), vm.kick(number), vm.near(b"\x01" + vm.varint(number)),
                      vm.near(b"\x03" + vm.varint(number)))
        enemy.say(vm.connect(1))
        body = enemy.wait_for(b"\x05")  # The near half is asked about connection 1: all before it was taken.
        need(body[1:2] == b"\x0b", f"{body!r}")


def test_no_answer_of_its_near_half(guest):
    """The vNIC fails after two seconds."""
    with Enemy(guest) as enemy:
        enemy.begin().say(vm.connect(1))
        for _ in range(40):
            enemy.say(vm.HEARTBEAT)
        need(enemy.is_ended(), "the stream goes on")


def test_a_silent_one(guest):
    with Enemy(guest) as enemy:
        enemy.begin()
        need(enemy.is_ended(), "the stream goes on")


def test_floods(guest):
    """Kicks of nobody, connections without end; and one that reads nothing."""
    with Enemy(guest) as enemy:
        enemy.begin()
        enemy.say(vm.kick(1) * 200_000)
    with Enemy(guest) as enemy:
        enemy.begin()
        try:
            enemy.say(b"".join(vm.connect(number) for number in range(1, 50_000)))
        except (ConnectionError, TimeoutError):
            pass


def test_random_bytes(guest):
    numbers = random.Random(SEED)
    for _ in range(30):
        with Enemy(guest) as enemy:
            enemy.begin()
            try:
                enemy.say(vm.frame(bytes(numbers.choices(range(8), k=1)) + numbers.randbytes(numbers.randrange(40))))
                enemy.say(vm.PREAMBLE)
            except ConnectionError:
                pass
            need(enemy.is_ended(), f"the stream goes on, seed {SEED}")


def test_the_device_is_truncated(host, guest, pair):
    """Whoever runs the machine can do that: the vNIC fails, is refused until it is made anew, and nobody else notices."""
    guest.boot()
    running = guest.start("ib_send_bw", "-F")
    guest.wait_for_sessions(1)
    os.truncate(guest.memory, 0)
    words = ["ib_write_bw", "-F", "-n", "100"]
    in_two_containers(*pair, words, [*words, "{ip}"], port=18515)
    guest.exec("ibv_devinfo", codes=(0, 1, 255), seconds=30)
    running.kill()
    guest.end()
    guest.wait_for_sessions(0)
    guest.boot(wait=False)
    guest.agent.wait_for_output("truncated")
    guest.end()
    host.freeflow("vm", "detach", "enemy")
    host.freeflow("vm", "attach", "enemy", "--size", vm.SIZE)
