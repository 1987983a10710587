#!/usr/bin/env python3
"""One end of a migration of a paused QEMU guest by RDMA, in tests/apps/test_programs.py.

    qemu_migration.py PORT             the destination
    qemu_migration.py PORT ADDRESS     the source

The guest's memory is a quarter zeroes and else random. A TCP connection at PORT keeps the ends in step, and brings the
destination the hash of the source's memory; RDMA uses the port after it. The source prints how often QEMU's threads
slept, the destination whether all bytes are right.
"""

import atexit
import hashlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import time

MEMORY_MIB = 64
RANDOM_AT, RANDOM_MIB = 16 << 20, 48
COMMAND = ["qemu-system-x86_64", "-accel", "tcg", "-m", f"{MEMORY_MIB}M", "-nodefaults", "-nographic", "-S"]
SECONDS = 60


class Qemu:
    def __init__(self, *words):
        command = [*COMMAND, "-qmp", "stdio", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        atexit.register(self.process.kill)
        self.call("qmp_capabilities")

    def call(self, name, **arguments):
        self.process.stdin.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
        for line in self.process.stdout:
            # Messages of its RDMA code come in between.
            answer = json.loads(line) if line.startswith("{") else {}
            if "error" in answer:
                raise SystemExit(f"{name}: {answer['error']}")
            if "return" in answer:
                return answer["return"]
        raise SystemExit(f"{name}: QEMU ended")

    def wait_for_completion(self):
        end = time.monotonic() + SECONDS
        while self.call("query-migrate").get("status") != "completed":
            if time.monotonic() > end:
                raise SystemExit(f"it takes too long: {self.call('query-migrate')}")
            time.sleep(0.05)

    def hash_of_memory(self, folder):
        path = pathlib.Path(folder) / "memory"
        self.call("pmemsave", val=RANDOM_AT, size=RANDOM_MIB << 20, filename=str(path))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def quit(self):
        self.call("quit")
        self.process.wait(SECONDS)


def source(port, address, folder):
    contents = pathlib.Path(folder) / "contents"
    contents.write_bytes(os.urandom(RANDOM_MIB << 20))
    qemu = Qemu("-device", f"loader,file={contents},addr={RANDOM_AT:#x},force-raw=on")
    wanted = hashlib.sha256(contents.read_bytes()).hexdigest()
    with socket.create_connection((address, port), SECONDS) as step:
        qemu.call("migrate-set-parameters", **{"max-bandwidth": 100 << 30})
        qemu.call("migrate", uri=f"rdma:{address}:{port + 1}")
        qemu.wait_for_completion()
        qemu.quit()
        step.sendall(wanted.encode())
    print(f"sleeps: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_nvcsw} for {MEMORY_MIB << 8} pages")


def destination(port, folder):
    qemu = Qemu("-incoming", "defer")
    qemu.call("migrate-incoming", uri=f"rdma:0.0.0.0:{port + 1}")
    with socket.create_server(("", port)) as listener:
        listener.settimeout(SECONDS)
        with listener.accept()[0] as step:
            step.settimeout(SECONDS)
            wanted = step.makefile().read()
    qemu.wait_for_completion()
    print("right" if qemu.hash_of_memory(folder) == wanted else "wrong", "contents")
    qemu.quit()


def main():
    with tempfile.TemporaryDirectory() as folder:
        port, *address = sys.argv[1:]
        source(int(port), address[0], folder) if address else destination(int(port), folder)


if __name__ == "__main__":
    main()
