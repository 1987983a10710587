"""An enemy in one container, and a healthy pair in two others, of which no request may fail."""

from harness import settings
from harness.failure import need
from harness.host import router_of
from harness.settings import PORT

SECONDS, SECONDS_FULL = 10, 60


class Healthy:
    """Traffic beside whatever goes on; `stop` says whether it was disturbed."""

    def __init__(self, host, load):
        self.host, self.load = host, load
        self.server, self.client = host.container("healthy1"), host.container("healthy2")

    def start(self):
        self.there = self.server.start(self.load, "server", PORT)
        self.server.wait_for_port(self.there)
        self.here = self.client.start(self.load, "-e", "client", self.server.ip, PORT)
        self.pid = self.host.router_pid()
        return self.there.wait_for_output("ready").split()[1:4]

    def stop(self):
        self.here.terminate()
        for side in (self.here, self.there):
            code = side.wait(30)
            need(code == 0 and "all right" in side.output(), f"the healthy pair was disturbed ({code}):\n{side.output()}")
        need(self.host.router_pid() == self.pid, "the router died and was started again")
        need(router_of(self.pid, self.host.run_dir), "the router died")
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
    seconds = SECONDS_FULL if settings.FULL else SECONDS
    before = host.status()["counters"][counter]
    note = container.exec(hostile, what, settings.SEED, seconds, seconds=seconds + 30).strip().splitlines()[-1]
    met = host.status()["counters"][counter] - before
    need(met > 0, f"{note}, but the router counted no {counter}")
    return f"{note}, {met} {counter}"
