#!/usr/bin/env python3
"""In a host's network: whoever connects to PORT of 127.0.0.1 reaches a Unix socket, whose other end is elsewhere.

    forward_inside.py PORT SOCKET      prints `ready`
"""

import socket
import sys
import threading


def pump(source, sink, replaced=None):
    """`replaced` are bytes and others as long, which take their place where they come in one piece."""
    try:
        while data := source.recv(65536):
            sink.sendall(data.replace(*replaced) if replaced else data)
    except OSError:
        pass
    for one in (source, sink):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def main():
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    print("ready", flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(sys.argv[2])
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


if __name__ == "__main__":
    main()
