#!/usr/bin/env python3
"""Makes a node's agent see an older Kubernetes, that knows DRA as v1beta1 alone, in front of a newer one that has both.

    older_kubernetes_inside.py PORT SERVER AUTHORITY TOKEN_FILE KUBELETS_SOCKET AGENTS_SOCKET

At PORT of 127.0.0.1 the API server, without the newer versions of resource.k8s.io, for the bearer of the token; at
KUBELETS_SOCKET the agent's registration, without the newer version of the kubelet's calls. Whatever passes is otherwise
what the two have said.
"""

import http.client
import http.server
import json
import os
import re
import socket
import ssl
import sys
import threading
import time

from forward_inside import pump

GROUP = "/apis/resource.k8s.io"
NEWER = re.compile(rf"{GROUP}/(v1|v1beta2)(/|\?|$)")
KEPT = "v1beta1"
# As long as the word that it replaces: it stands in a message with lengths.
HIDDEN = (b"v1.DRAPlugin", b"v0.DRAPlugin")
OF_A_HOP = ("host", "connection", "transfer-encoding", "content-length", "authorization")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        if NEWER.match(self.path):
            return self.answer(404, json.dumps({"kind": "Status", "code": 404, "reason": "NotFound", "message": "not here"}).encode())
        server = self.server
        connection = http.client.HTTPSConnection(*server.behind, context=server.context)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_A_HOP}
        with open(server.token_file) as token:
            headers["Authorization"] = f"Bearer {token.read().strip()}"
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        print(self.command, self.path, answer.status, flush=True)
        if "watch=true" in self.path:
            return self.stream(answer)
        text = answer.read()
        if self.path.split("?")[0] == GROUP:
            group = json.loads(text)
            group["versions"] = [one for one in group["versions"] if one["version"] == KEPT]
            text = json.dumps(group).encode()
        return self.answer(answer.status, text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def answer(self, code, text):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, answer):
        self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        while text := answer.read1():
            self.wfile.write(text)


def register(kubelets, agents):
    while not os.path.exists(agents):
        time.sleep(0.1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(kubelets)
    listener.listen()
    while True:
        kubelet, _ = listener.accept()
        agent = socket.socket(socket.AF_UNIX)
        agent.connect(agents)
        threading.Thread(target=pump, args=(kubelet, agent), daemon=True).start()
        threading.Thread(target=pump, args=(agent, kubelet, HIDDEN), daemon=True).start()


def main():
    port, server, authority, token_file, kubelets, agents = sys.argv[1:]
    host, _, server_port = server.removeprefix("https://").partition(":")
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    proxy.behind, proxy.context, proxy.token_file = (host, int(server_port)), ssl.create_default_context(cafile=authority), token_file
    threading.Thread(target=register, args=(kubelets, agents), daemon=True).start()
    proxy.serve_forever()


main()
