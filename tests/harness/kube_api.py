"""As much of a Kubernetes API server as FreeFlow's controller asks for: lists, watches, merge patches, finalizers.

It checks no schemas and no rights. `tests/kubernetes` has a real one.
"""

import http.server
import json
import re
import socketserver
import threading
import urllib.parse

PATH = re.compile(r"(/apis/(?P<group>[^/]+)/[^/]+|/api/v1)(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(/(?P<name>[^/]+))?(/status)?$")


def merge(into, patch):
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, code, value):
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def refuse(self, code, reason):
        self.answer(code, {"kind": "Status", "code": code, "reason": reason, "message": reason})

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        place = PATH.fullmatch(url.path)
        if not place:
            return self.refuse(404, "NotFound")
        api, plural, namespace, name = self.server.api, place["plural"], place["namespace"], place["name"]
        if self.command == "GET" and query.get("watch"):
            return self.watch(plural, int(query["resourceVersion"]))
        if self.command == "GET" and not name:
            with api.lock:
                items = [one for (kind, _, _), one in api.objects.items() if kind == plural]
                return self.answer(200, {"metadata": {"resourceVersion": str(api.version)}, "items": items})
        key = (plural, namespace or "", name or "")
        if self.command == "POST":
            name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{api.version}"
            return self.answer(201, api.put(plural, namespace or "", name, body))
        with api.lock:
            there = api.objects.get(key)
            if not there:
                return self.refuse(404, "NotFound")
            if self.command == "GET":
                return self.answer(200, there)
            asked = body.get("metadata", {}).pop("resourceVersion", None)
            if asked not in (None, there["metadata"]["resourceVersion"]):
                return self.refuse(409, "Conflict")
            there = json.loads(json.dumps(there))
            merge(there, body)
            return self.answer(200, api.changed(key, there))

    do_GET = do_POST = do_PATCH = handle_any

    def watch(self, plural, version):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        api = self.server.api
        while True:
            with api.lock:
                news = [event for event in api.events if event[0] > version and event[1] == plural]
                if not news:
                    api.lock.wait(1)
                if api.ended:
                    return
            for version, _, event in news:
                try:
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                except OSError:
                    return


class KubeApi:
    """`with` it; `url` says where it listens, if it is not at the path of a Unix socket."""

    def __init__(self, path=None):
        self.path = path
        self.objects, self.events, self.version, self.ended = {}, [], 1, False
        self.lock = threading.Condition(threading.RLock())
        self.server = socketserver.ThreadingUnixStreamServer(str(path), Handler) if path else http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.api = True, self
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        with self.lock:
            self.ended = True
            self.lock.notify_all()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def changed(self, key, value):
        with self.lock:
            self.version += 1
            value["metadata"]["resourceVersion"] = str(self.version)
            is_gone = "deletionTimestamp" in value["metadata"] and not value["metadata"].get("finalizers")
            kind = "DELETED" if is_gone else "MODIFIED" if key in self.objects else "ADDED"
            if is_gone:
                self.objects.pop(key, None)
            else:
                self.objects[key] = value
            self.events.append((self.version, key[0], {"type": kind, "object": json.loads(json.dumps(value))}))
            self.lock.notify_all()
            return value

    def put(self, plural, namespace, name, value):
        """A new object, or a new spec of one."""
        with self.lock:
            old = self.objects.get((plural, namespace, name))
            metadata = dict(old["metadata"]) if old else {"name": name, "namespace": namespace, "uid": f"uid-{self.version}"}
            metadata["generation"] = metadata.get("generation", 0) + 1
            return self.changed((plural, namespace, name), {**(old or {}), **value, "metadata": metadata})

    def delete(self, plural, namespace, name):
        with self.lock:
            value = json.loads(json.dumps(self.objects[plural, namespace, name]))
            value["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.changed((plural, namespace, name), value)

    def get(self, plural, namespace, name):
        with self.lock:
            return self.objects.get((plural, namespace, name))

    def conditions(self, plural, namespace, name):
        """By type, each with its status, reason and message; `None`: there is no such object."""
        there = self.get(plural, namespace, name)
        found = (there or {}).get("status", {}).get("conditions", [])
        return there and {one["type"]: (one["status"], one["reason"], one["message"]) for one in found}
