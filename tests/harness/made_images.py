"""A small file system for containers, made of this machine's programs and the libraries that they need."""

import hashlib
import io
import json
import pathlib
import re
import shutil
import tarfile

from harness.failure import need
from harness.processes import run

LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "/lib64/ld-linux-x86-64.so.2"
FOLDERS = ("bin", "usr/bin", LIBRARIES, "lib64", "etc", "proc", "sys", "dev", "tmp", "run")


def make_root(directory, *programs):
    """As an image has it: Debian's libibverbs and its providers, none of FreeFlow's libraries."""
    root = pathlib.Path(directory)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "tmp").chmod(0o1777)
    for program in programs:
        path = shutil.which(program)
        need(path, f"{program} is not installed: scripts/install-deps")
        add_program(root, path, f"bin/{pathlib.Path(program).name}")
    # Opened by name: by threads that end, and by the drop-in library.
    shutil.copy("/lib/x86_64-linux-gnu/libgcc_s.so.1", root / LIBRARIES)
    shutil.copy(LOADER, root / "lib64")
    return root


def add_program(root, path, name):
    """A program, and the libraries that it needs, if it is linked dynamically."""
    shutil.copy(pathlib.Path(path).resolve(), root / name)
    for library in re.findall(r"=> (/\S+)", run(["ldd", path], codes=(0, 1))):
        target = root / LIBRARIES / pathlib.Path(library).name
        if not target.exists():
            shutil.copy(pathlib.Path(library).resolve(), target)


def archive(root, path, config, name):
    """An OCI image of one layer, as a file that `ctr image import` reads."""
    blobs = {}

    def blob(data, kind):
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layer = layer_of(root)
    described = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": {
        "type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}}
    manifest = {"schemaVersion": 2, "config": blob(json.dumps(described).encode(), "config.v1+json"),
                "layers": [blob(layer, "layer.v1.tar")]}
    listed = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    listed["annotations"] = {"io.containerd.image.name": name}
    files = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": {"schemaVersion": 2, "manifests": [listed]}}
    with tarfile.open(path, "w") as tar:
        for file, data in [*((name, json.dumps(text).encode()) for name, text in files.items()),
                           *((f"blobs/sha256/{digest}", data) for digest, data in blobs.items())]:
            entry = tarfile.TarInfo(file)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def layer_of(root):
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    return layer.getvalue()
