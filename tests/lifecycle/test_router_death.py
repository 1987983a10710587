"""The router is killed under load: every program learns of it at once, and `freeflow up` brings the host back."""

import pathlib
import time

import pytest

import harness
from harness import PORT, need

# It takes milliseconds, which are shown; on a busy machine all ten programs and their ends take turns.
SECONDS_MAX = 10.0
# A port for each pair of programs, so that all of them run in the same two containers at the same time.
PROGRAMS = {
    "polling, traffic": ["-f"],
    "polling, nothing but receives posted": ["-f", "-i"],
    "asleep in the completion channel, traffic": ["-f", "-e"],
    "asleep in the completion channel, nothing but receives posted": ["-f", "-e", "-i"],
    "polling, ibv_malloc": ["-f", "-m", "shared"],
}


def start_programs(load, server, client):
    running = {}
    for number, (name, options) in enumerate(PROGRAMS.items()):
        port = PORT + number
        there = server.start(load, *options, "server", port)
        server.wait_for_port(there, port)
        here = client.start(load, *options, "client", server.ip, port)
        running[f"server {name}"], running[f"client {name}"] = there, here
    for side, container in (("server", server), ("client", client)):
        running[f"{side} asleep in ibv_get_async_event"] = container.start(load, "-a")
    for program in running.values():
        program.wait_for_output("ready")
    return running


def learned(program, died_ns):
    """`fatal FIRST_ERROR DEVICE_FATAL`: both after the death, both soon."""
    code = program.wait(15)
    need(code == 0, f"exit code {code}:\n{program.output()}")
    line = next((line for line in program.output().splitlines() if line.startswith("fatal ")), None)
    need(line, f"no DEVICE_FATAL:\n{program.output()}")
    first_error_ns, fatal_ns = (int(word) for word in line.split()[1:])
    for what, at_ns in (("flushed work", first_error_ns), ("DEVICE_FATAL", fatal_ns)):
        need(at_ns == 0 or at_ns - died_ns < SECONDS_MAX * 1e9, f"{what} came {(at_ns - died_ns) / 1e9:.3f} s late")
    return f"{max(0, (max(first_error_ns, fatal_ns) - died_ns)) / 1e6:.1f} ms"


def no_router(container):
    """A program that starts now learns what is wrong and what to do, not that there is no device."""
    output = container.exec("ibv_devinfo", codes=range(256))
    need("freeflow up" in output, f"no remedy in:\n{output}")


def recover(host, containers):
    names = {container.name for container in containers}
    host.up()
    need(names <= {row["name"] for row in host.containers()}, "a container was lost")
    need(pathlib.Path(f"/proc/{host.router_pid()}").exists(), "no router")


def connect_again(load, server, client):
    _, output = harness.in_two_containers(server, client, [load, "-t", 1, "server", PORT],
                                      [load, "-t", 1, "client", "{ip}", PORT])
    need("all right" in output, output)


@pytest.mark.parametrize("death", ["first", "second"])
def test_router_is_killed_under_load(check, host, server, client, death):
    load = harness.program("load")
    running = start_programs(load, server, client)
    time.sleep(0.3)
    died_ns = harness.kill_router(host)
    for name, program in running.items():
        check(name, learned, program, died_ns)
    check("a new program gets the remedy", no_router, client)
    check("freeflow up", recover, host, (server, client))
    check("the same containers connect again", connect_again, load, server, client)
