"""Programs by rsockets: by the preload library, or of their own."""

import contextlib
import json

from harness import cm, settings
from harness.failure import need

PRELOAD = settings.DIST / "lib" / "rsocket" / "librspreload.so"
IPERF_PORT, UDPONG_PORT = 5201, 7174
SECONDS = 60


def by_rsocket(*words):
    return ["env", f"LD_PRELOAD={PRELOAD}", *words]


def is_kernels(container, port):
    """Whether a TCP socket of the kernel's listens: then this would show nothing."""
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{container.pid}/net/{table}") as rows:
            if any(f":{port:04X} " in row.split(None, 2)[1] + " " and " 0A " in row for row in list(rows)[1:]):
                return True
    return False


@contextlib.contextmanager
def serving(server, port, *words):
    with cm.listening(server, *by_rsocket(*words)) as running:
        need(not is_kernels(server, port), f"`{running.text()}` listens by TCP")
        yield running


def iperf3(server, client, *options):
    with serving(server, IPERF_PORT, "iperf3", "-s", "-1") as running:
        output = client.exec(*by_rsocket("iperf3", "-J", "-c", server.ip, "-t", "1", *options), seconds=SECONDS)
        end = json.loads(output)["end"]
        received = end["sum_received"]["bytes"]
        need(received > 1 << 20, f"only {received} bytes:\n{output[-1500:]}")
        cm.finish(running, 10)
    return f"{end['sum_received']['bits_per_second'] / 1e9:.2f} Gb/s"


def datagrams(server, client, mode):
    """udpong calls rsockets by name; its server never ends, and is no listener of connections' kind."""
    options = ["-T", mode, "-S", "64", "-C", "200"]
    running = server.start("udpong", "-b", server.ip, "-T", mode)
    try:
        cm.wait_until(lambda: is_bound(server, UDPONG_PORT), "udpong does not begin", 15)
        output = client.exec("udpong", "-s", server.ip, *options, seconds=SECONDS)
        need("custom" in output, output)
    finally:
        running.kill()
        server.background.remove(running)
    return output.strip().splitlines()[-1].strip()


def is_bound(container, port):
    for table in ("udp", "udp6"):
        with open(f"/proc/{container.pid}/net/{table}") as rows:
            if any(f":{port:04X} " in row for row in rows):
                return True
    return False
