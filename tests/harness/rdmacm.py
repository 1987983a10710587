"""rdmacm-utils: their names, and multicast by them."""

import time

from harness import cm
from harness.failure import need

PROGRAMS = ("rping", "ucmatose", "udaddy", "mckey", "rdma_server", "rdma_client", "rdma_xserver", "rdma_xclient", "cmtime",
            "rstream", "riostream", "rcopy")
GROUP = "239.1.2.3"


def multicast(members, sender, options=(), group=GROUP):
    """mckey: all members hear the sender. It waits some seconds before it sends, in which all have to join."""
    words = ["mckey", "-m", group, *options]
    ends = [(end, end.start(*words, "-b", end.ip)) for end in members]
    time.sleep(1)
    ends.append((sender, sender.start(*words, "-b", sender.ip, "-s")))
    try:
        for _, running in ends:
            output = cm.finish(running, 30)
            need("data transfers complete" in output and "return status 0" in output, output)
    finally:
        for end, running in ends:
            running.kill()
            end.background.remove(running)
