"""The control plane's REST server, as a client of its socket; and its metrics."""

import contextlib
import fcntl
import http.client
import json
import pathlib
import re
import socket
import subprocess
import time

from harness import settings
from harness.failure import Failure, need

BASE = "/apis/freeflow.io/v1"
UID = 64_210  # nobody's; those after it too
GROUPS = ("freeflow-admin", "freeflow-viewer", "freeflow-tenant-blue", "freeflow-tenant-red")
GROUPS_LOCK = "/run/lock/freeflow-test-groups"
GROUPS_WAIT = 120
NAME = re.compile(r"[a-z_]+")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


class Connection(http.client.HTTPConnection):
    def __init__(self, path, timeout=30):
        super().__init__("freeflow", timeout=timeout)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        # One that has a timeout does not wait for a place in the listener's queue.
        self.sock.connect(self.path)
        self.sock.settimeout(self.timeout)


class Api:
    def __init__(self, host):
        self.path = host.run_dir / "api.sock"

    def ask(self, method, path, body=None, base=BASE):
        """The code, and what was answered."""
        with contextlib.closing(Connection(self.path)) as connection:
            text = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
            # A client that is refused at once need not have sent all.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, base + path, text)
            response = connection.getresponse()
            content = response.read()
        return response.status, json.loads(content) if content.startswith(b"{") else content.decode()

    def want(self, code, method, path, body=None, base=BASE):
        got, answer = self.ask(method, path, body, base)
        need(got == code, f"{method} {path}: {got}, not {code}: {str(answer)[:2000]}")
        if code >= 400:
            need(answer["kind"] == "Status" and answer["code"] == code and answer["message"], f"no Status: {answer}")
        return answer

    def names(self, plural, query=""):
        return [item["metadata"]["name"] for item in self.want(200, "GET", f"/{plural}{query}")["items"]]

    def watch(self, path):
        return Watch(self, path)


class Watch:
    """A line an event; `with` it."""

    def __init__(self, api, path):
        self.connection = Connection(api.path)
        self.connection.request("GET", BASE + path)
        self.response = self.connection.getresponse()
        if self.response.status != 200:  # else this would wait for its end
            raise Failure(f"{path}: {self.response.status} {self.response.read()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def event(self):
        line = self.response.readline()
        return json.loads(line) if line else None

    def expect(self, *words):
        for word in words:
            while (event := self.event()) and event["type"] == "BOOKMARK":
                pass
            said = event and f"{event['type']} {event['object']['metadata']['name']}"
            need(said == word, f"{word} was expected, not {event}")


@contextlib.contextmanager
def groups(names=GROUPS):
    """The numbers of these groups, which exist as long as this does; one test at a time."""
    with open(GROUPS_LOCK, "w") as lock:
        end = time.monotonic() + GROUPS_WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                need(time.monotonic() < end, "another test keeps the groups")
                time.sleep(0.05)
        made = []
        try:
            for name in names:
                if subprocess.run(["groupadd", "--system", name], capture_output=True).returncode == 0:
                    made.append(name)
            lines = pathlib.Path("/etc/group").read_text().splitlines()
            numbers = {fields[0]: int(fields[2]) for fields in (line.split(":") for line in lines)}
            yield {name: numbers[name] for name in names}
        finally:
            for name in made:
                subprocess.run(["groupdel", name], capture_output=True)


def listed():
    """Name: type and labels, by docs/metrics.txt."""
    text = (settings.ROOT / "docs" / "metrics.txt").read_text()
    lines = [line.split(" ", 3) for line in text.splitlines() if not line.startswith("#")]
    return {name: (kind, [] if labels == "-" else labels.split(",")) for name, kind, labels, _ in lines}


def parse(text):
    """{(name, labels as a frozen set): value}, after a check of the whole against the list."""
    known, samples, current, seen = listed(), {}, None, set()
    need(text.endswith("\n"), "the last line has no end")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            need(current in known and current not in seen, f"{current} is not listed, or comes twice")
            seen.add(current)
        elif line.startswith("# TYPE "):
            need(line.split()[2:] == [current, known[current][0]], line)
        else:
            name, value = NAME.match(line)[0], line.rsplit(" ", 1)[1]
            labels = LABEL.findall(line)
            need(name == current and [label for label, _ in labels] == known[name][1], f"not as listed: {line}")
            key = (name, frozenset(labels))
            need(key not in samples, f"twice: {line}")
            samples[key] = float(value)
    return samples


def value(samples, name, **labels):
    found = [count for (of, have), count in samples.items() if of == name and set(labels.items()) <= have]
    need(found, f"no {name} of {labels}")
    return sum(found)


def scrape(api):
    return parse(api.want(200, "GET", "/metrics", base=""))
