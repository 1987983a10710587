"""rdma-core's pingpongs, each end the command of its own `freeflow run` container."""

import time

from harness.failure import need
from harness.processes import Running, again_after, waiting
from harness.settings import PORT

# With another machine: the timeout (67 ms, 7 retries) can't be chosen, and somebody between the two may have no processor for longer.
unhurried = again_after(("transport retry counter exceeded",), 3)


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
                 + "\n".join(waiting(server.process.pid)))
            row = next((row for row in host.containers() if row["name"] == "server" and row["pid"]), None)
            time.sleep(0.02)
        client = Running((client_host or host).command("run", "--rm", "--name", "client", "--", *words, row["ip"]))
        code = client.wait(60)
        need(code == 0, f"the client gave {code}:\n{client.output()}\n--- the server printed:\n{server.output()}")
        code = server.wait(20)
        need(code == 0, f"the server gave {code}:\n{server.output()}")
        # ibv_xsrq_pingpong prints no time.
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
