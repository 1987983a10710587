"""Docker 20.10 and 26.1, containerd 1.6 and 1.7, by CDI and by `freeflow runtime`, as docs/ENGINES.md says: `make test-engines`.

Unmodified programs of Debian in an image made of local files, unprivileged; ends of all kinds. Enemies: test_engine_enemies.py.
"""

import os
import re
import signal

import pytest
import yaml

from harness import settings
from harness.engines import wait_until
from harness.failure import need

MANY = 10


def listens(engine):
    """Whether the only container has a socket that listens: of TCP, or of rdma_cm."""
    pid = int(engine.host.containers()[0]["pid"])
    with open(f"/proc/{pid}/net/tcp") as sockets:
        return " 0A " in sockets.read() or engine.host.status()["cm"]["listener_count"] > 0


def between_two(place, server, client):
    """A server in one container, and a client that gets its address in another; what the client printed."""
    engine = place.engine
    engine.detached("server", place.given, *server)
    address = engine.address()
    wait_until(lambda: listens(engine), "the server listens")
    output = engine.run("client", place.given, *(word.replace("{ip}", address) for word in client))
    engine.remove("server")
    engine.wait_for_no_vnic()
    return output


def test_unmodified_programs_unprivileged(place):
    output = place.engine.run("one", place.given, "sh", "-c", "ibv_devinfo; ls /run/freeflow /sys/class/net")
    need("freeflow0" in output and "PORT_ACTIVE" in output and "ff0" in output, output)
    place.engine.wait_for_no_vnic()
    words = ["ib_write_bw", "-F", "-n", "200"]
    output = between_two(place, words, [*words, "{ip}"])
    need(re.search(r"^ 65536 +200 ", output, re.M), output)


def test_rdma_cm(place):
    output = between_two(place, ["rping", "-s", "-a", "0.0.0.0", "-C", "10"], ["sh", "-c", "rping -c -a {ip} -C 10 -v && echo done"])
    need("done" in output, output)


def test_a_network_is_chosen_by_who_starts_the_container(place):
    place.engine.detached("one", place.in_network("red"), "sleep", "600")
    need([vnic["network"] for vnic in place.engine.vnics()] == ["red"], place.engine.vnics())


def test_a_killed_shim_leaves_nothing(place):
    place.engine.detached("one", place.given, "sleep", "600")
    need(len(place.engine.vnics()) == 1, "no vNIC")
    os.kill(place.engine.shim_of("one"), signal.SIGKILL)
    place.engine.wait_for_no_vnic()


def test_a_killed_program_leaves_nothing(place):
    place.engine.detached("one", place.given, "sleep", "600")
    os.kill(int(place.engine.host.containers()[0]["pid"]), signal.SIGKILL)
    place.engine.remove("one")
    place.engine.wait_for_no_vnic()


@pytest.mark.at("docker-20.10", "docker-26.1")
def test_pause_and_update(place):
    place.engine.detached("one", place.given, "sleep", "600")
    place.engine.call("pause", "one")
    place.engine.call("unpause", "one")
    place.engine.call("update", "--cpu-shares", "512", "one")
    need("freeflow0" in place.engine.call("exec", "one", "ibv_devinfo"), "no device")


def test_many_at_once(place):
    running = [place.engine.begun(f"many{number}", place.given, "ibv_devinfo") for number in range(MANY)]
    for one in running:
        need(one.wait(300) == 0 and "PORT_ACTIVE" in one.output(), one.output())


def test_an_unknown_network_is_refused_with_its_name(place):
    output = place.engine.run("one", place.in_network("blue"), "ls", codes=(1, 125, 126, 127))
    need("blue" in output, output)


def services():
    """Of the compose file in docs/ENGINES.md."""
    text = (settings.ROOT / "docs/ENGINES.md").read_text()
    return yaml.safe_load(re.search(r"^```yaml\n(services:.*?)^```", text, re.M | re.S)[1])["services"]


@pytest.mark.at("docker-26.1-cdi")
def test_the_compose_example(place):
    """Each service by the options of `docker run` that its keys stand for; an address in place of the server's name."""
    options = {"devices": "--device", "cap_drop": "--cap-drop", "security_opt": "--security-opt"}
    engine, server = place.engine, None
    for name, service in services().items():
        keys = set(service) - {"image", "command", "depends_on", "user"} - set(options)
        need(not keys, f"keys that this test does not know: {keys}")
        given = [word for key, option in options.items() for value in service.get(key, ()) for word in (option, value)]
        words = service["command"].replace("server", server or "server").split()
        if server is None:
            engine.detached(name, given, *words)
            server = engine.address()
            wait_until(lambda: listens(engine), "the server listens")
        else:
            need("65536" in (output := engine.run(name, given, *words)), output)
