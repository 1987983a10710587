"""A machine that never heard of FreeFlow: Linux with Soft-RoCE in an emulated guest, on a network of this machine's.

`Guest` makes a tap device in the network namespace that the test runs in, boots `scripts/rxe-guest` on it, once, and runs any
number of commands in it, side by side. It has the methods of `harness.Container`, so either can be the other's peer.
"""

import itertools
import json
import subprocess
import threading
import time

from harness import settings
from harness.failure import Failure, need
from harness.processes import run
from harness.settings import PORT

SCRIPT = settings.ROOT / "scripts" / "rxe-guest"
AGENT = settings.TESTS / "harness" / "rxe_agent.py"
TAP = "rxe-guest"
BOOT_SECONDS = 120
ANSWER_SECONDS = 30


class GuestRunning:
    """A program in the guest; like `harness.Running`."""

    def __init__(self, guest, number, command):
        self.guest, self.number, self.command = guest, number, command
        self.chunks, self.code = [], None

    def output(self):
        with self.guest.changed:
            return "".join(self.chunks)

    def poll(self):
        return self.code

    @property
    def process(self):
        return self

    def wait(self, seconds):
        with self.guest.changed:
            self.guest.changed.wait_for(lambda: self.code is not None or self.guest.ended, seconds)
        need(not self.guest.ended or self.code is not None, f"the guest ended during `{self.text()}`")
        if self.code is None:
            self.kill()
            raise Failure(f"`{self.text()}` did not end within {seconds} s in the guest; it printed:\n{self.output()}")
        return self.code

    def wait_for_output(self, word, seconds=20):
        with self.guest.changed:
            self.guest.changed.wait_for(lambda: word in "".join(self.chunks) or self.code is not None or self.guest.ended, seconds)
        need(word in self.output(), f"`{self.text()}` never said '{word}' in the guest:\n{self.output()}")
        return self.output()

    def kill(self):
        if self.code is None and not self.guest.ended:
            self.guest.say(id=self.number, kill=True)

    def text(self):
        return " ".join(self.command)


class Guest:
    """`addresses`: of the guest, and `gateways`: of this side of the tap; both with prefix lengths, IPv4 first."""

    def __init__(self, addresses, gateways, seconds):
        self.ip = addresses[0].split("/")[0]
        run(["ip", "tuntap", "add", "dev", TAP, "mode", "tap"])
        for gateway in gateways:
            run(["ip", "address", "add", gateway, "dev", TAP, *(["nodad"] if ":" in gateway else [])])
        run(["ip", "link", "set", "dev", TAP, "mtu", "4200", "up"])
        words = ["--seconds", seconds, "--tap", TAP]
        words += [f"--address={address}" for address in addresses]
        words += [f"--gateway={gateway.split('/')[0]}" for gateway in gateways]
        self.begin(words)

    def begin(self, words, prefix=()):
        """Boots it. `words`: of scripts/rxe-guest."""
        self.background, self.programs, self.answers = [], {}, {}
        self.numbers, self.changed, self.ended, self.ready = itertools.count(1), threading.Condition(), False, False
        self.said = []
        words = [*prefix, SCRIPT, "--stdin", *words, "--", "python3", AGENT]
        self.process = subprocess.Popen([str(word) for word in words], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def wait_until_up(self):
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.ended, BOOT_SECONDS)
        need(self.ready and not self.ended, "the guest does not come up:\n" + "".join(self.said))

    def listen(self):
        for line in self.process.stdout:
            with self.changed:
                self.hear(line)
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def hear(self, line):
        try:
            message = json.loads(line)
            program = self.programs.get(message.get("id"))
        except ValueError:
            self.said.append(line)
            return
        self.ready |= "ready" in message
        if "output" in message:
            program.chunks.append(message["output"])
        elif "code" in message:
            program.code = message["code"]
        elif "listens" in message:
            self.answers[message["id"]] = message["listens"]

    def say(self, **message):
        with self.changed:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    # ---- as of a container

    def start(self, *command):
        self.wait_until_up()
        words = [str(word) for word in command]
        with self.changed:
            running = GuestRunning(self, next(self.numbers), words)
            self.programs[running.number] = running
        self.say(id=running.number, start=words)
        self.background.append(running)
        return running

    def exec(self, *command, seconds=60, codes=(0,)):
        running = self.start(*command)
        self.background.remove(running)
        try:
            code = running.wait(seconds)
        except BaseException:
            running.kill()
            raise
        need(code in codes, f"`{running.text()}` gave exit code {code} in the guest:\n{running.output()}")
        return running.output()

    def listens(self, port):
        number = next(self.numbers)
        self.say(id=number, listens=port)
        with self.changed:
            self.changed.wait_for(lambda: number in self.answers or self.ended, ANSWER_SECONDS)
        need(number in self.answers, "the guest's agent does not answer")
        return self.answers.pop(number)

    def wait_for_port(self, running, port=PORT, seconds=20):
        end = time.monotonic() + seconds
        while not self.listens(port):
            need(running.code is None, f"`{running.text()}` ended with {running.code} before it listened:\n{running.output()}")
            need(time.monotonic() < end, f"`{running.text()}` does not listen on {port} in the guest:\n{running.output()}")
            time.sleep(0.02)

    def close(self):
        self.end()
        run(["ip", "link", "delete", "dev", TAP])

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(10)
