"""Debian's perftest: a row, which is a program and its switches, between two containers."""

import re

from harness import cm
from harness.failure import need
from harness.host import in_two_containers
from harness.processes import steady

ROW = re.compile(r"^ *\d+ +\d+ +\d+\.\d+ +\d+\.\d+", re.MULTILINE)
DURATION_ROW = re.compile(r"^ *\d+ +\d+ +\d+\.\d+", re.MULTILINE)
# Programs that spin and a router that want the same processors hand over by time slices: 240 round trips of -a are many.
ROW_SECONDS = 100
# ::ffff:239.1.2.3, as perftest wants it: the group it takes by itself is no IPv4 one, and it refuses to mix.
GROUP = "0:0:0:0:0:0:0:0:0:0:255:255:239:1:2:3"


@steady
def one(server, client, words, directory):
    sides = [[word.replace("{files}", f"{directory}/file").replace("{side}", side) for word in words]
             for side in ("server", "client")]
    for word in sides[0] + sides[1]:
        if word.startswith("--mmap="):
            with open(word.removeprefix("--mmap="), "wb") as file:
                file.truncate(1 << 20)
    if "-R" in words or "-z" in words:  # then nothing listens by TCP
        row = cm.Row("", sides[0], [*sides[1], "{ip}"], seconds=ROW_SECONDS)
        server_output, output = cm.run_row(server, client, row)
    else:
        server_output, output = in_two_containers(server, client, sides[0], [*sides[1], "{ip}"], seconds=ROW_SECONDS)
    if "--reversed" in words:
        output = server_output + output
    rows = DURATION_ROW if "-D" in words or words[0].endswith("_lat") else ROW
    found = rows.findall(output)
    need(found, f"no row of results:\n{output}")
    if "-a" in words:
        need(len(found) >= 12, f"only {len(found)} sizes:\n{output}")
    return found[-1].strip()
