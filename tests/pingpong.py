#!/usr/bin/env python3
"""Debian's ibverbs-utils, unmodified, each end in its own `freeflow run` container."""

import time

import lib
from lib import PORT, Running, need

# With another machine: the timeout (67 ms, 7 retries) can't be chosen, and somebody between the two may have no processor for longer.
unhurried = lib.again_after(("transport retry counter exceeded",), 3)


def run_pair(host, words, client_host=None):
    """The server and the client are the containers' own commands: nothing is started by `exec`."""
    server = Running(host.command("run", "--rm", "--name", "server", "--", *words))
    client = None
    try:
        end = time.monotonic() + 20
        row = None
        while not row or not listening(int(row["pid"])):
            need(server.process.poll() is None, f"the server ended early:\n{server.output()}")
            need(time.monotonic() < end, f"the server does not listen:\n{server.output()}\n"
                 + "\n".join(lib.waiting(server.process.pid)))
            row = next((row for row in host.containers() if row["name"] == "server" and row["pid"]), None)
            time.sleep(0.02)
        client = Running((client_host or host).command("run", "--rm", "--name", "client", "--", *words, row["ip"]))
        code = client.wait(60)
        need(code == 0, f"the client gave {code}:\n{client.output()}\n--- the server printed:\n{server.output()}")
        code = server.wait(20)
        need(code == 0, f"the server gave {code}:\n{server.output()}")
        # ibv_xsrq_pingpong tells no time.
        word = "success" if "xsrq" in words[0] else "iters in"
        need(word in client.output() and word in server.output(), f"no result:\n{client.output()}{server.output()}")
        return client.output().strip().splitlines()[-1]
    finally:
        server.kill()
        if client:
            client.kill()


def listening(pid):
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}") as sockets:
                if any(f":{PORT:04X} " in line and " 0A " in line for line in sockets):
                    return True
        except OSError:
            return False
    return False


def devinfo(container):
    text = container.exec("ibv_devinfo", "-v")
    for wanted in ("freeflow0", "PORT_ACTIVE", "Ethernet", f"::ffff:{container.ip}", "RoCE v2", "active_mtu"):
        need(wanted in text, f"'{wanted}' is not in:\n{text}")
    need("0x02c9" not in text, "the device claims to be a Mellanox one")


def devices(container):
    text = container.exec("ibv_devices")
    need("freeflow0" in text, text)


def asyncwatch(container):
    watch = container.start("ibv_asyncwatch")
    watch.wait_for_output("freeflow0")
    time.sleep(0.2)
    need(watch.process.poll() is None, f"ibv_asyncwatch ended:\n{watch.output()}")
    watch.kill()


def test(checks):
    lib.require_commands("ibv_rc_pingpong", "ibv_devinfo", "ibv_asyncwatch")
    with lib.Host() as host:
        container = host.container("looker")
        checks.check("ibv_devinfo -v", devinfo, container)
        checks.check("ibv_devices", devices, container)
        checks.check("ibv_asyncwatch", asyncwatch, container)
        container.remove()
        for kind in ("rc", "uc", "ud", "srq"):
            # -g 0: these four never look for a GID by themselves, on any RoCE device.
            for options in ([], ["-e"], ["-s", "1024", "-n", "3000"]):
                words = [f"ibv_{kind}_pingpong", "-g", "0", *options]
                checks.check(" ".join(words), run_pair, host, words)
        for options in (["-N"], ["-t"], ["-c"], ["-s", "1048576", "-n", "200", "-m", "4096"], ["-o"], ["-O"], ["-o", "-P"],
                        ["-j"], ["-t", "-o", "-N"], ["-t", "-j", "-N", "-c"], ["-O", "-P", "-e", "-c"]):
            words = ["ibv_rc_pingpong", "-g", "0", *options]
            checks.check(" ".join(words), run_pair, host, words)
        for options in (["-o"], ["-o", "-c"]):
            words = ["ibv_srq_pingpong", "-g", "0", *options]
            checks.check(" ".join(words), run_pair, host, words)
        for options in ([], ["-e"], ["-o"], ["-s", "65536", "-n", "200"]):
            words = ["ibv_xsrq_pingpong", "-g", "0", *options]
            checks.check(" ".join(words), run_pair, host, words)


if __name__ == "__main__":
    lib.main(test)
