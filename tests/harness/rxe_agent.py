#!/usr/bin/env python3
"""Runs commands inside the guest with Linux's Soft-RoCE, several at a time, for tests/harness/rxe_guest.py outside.

One JSON object a line. In: {"id", "start": [COMMAND…]}, {"id", "kill": true}, {"id", "listens": PORT}.
Out: {"id", "output": TEXT}, {"id", "code": NUMBER} when a command has ended and all its output is out, {"id", "listens": BOOL}.
Ends with its input, and kills what still runs.
"""

import json
import os
import signal
import subprocess
import sys
import threading

OUT = threading.Lock()
LISTEN = "0A"


def say(**message):
    with OUT:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def listens(port):
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as rows:
            if any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == LISTEN for row in list(rows)[1:]):
                return True
    return False


def carry(number, process):
    """Hands the output out as it comes, then the exit code."""
    while chunk := os.read(process.stdout.fileno(), 65536):
        say(id=number, output=chunk.decode(errors="replace"))
    say(id=number, code=process.wait())


def kill(process):
    if process and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def main():
    processes = {}
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        number = order["id"]
        if "start" in order:
            try:
                process = subprocess.Popen(order["start"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                           stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                say(id=number, output=f"{error}\n")
                say(id=number, code=127)
                continue
            processes[number] = process
            threading.Thread(target=carry, args=(number, process), daemon=True).start()
        elif "kill" in order:
            kill(processes.get(number))
        else:
            say(id=number, listens=listens(order["listens"]))
    for process in processes.values():
        kill(process)


if __name__ == "__main__":
    main()
