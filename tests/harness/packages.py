"""What `scripts/package` makes of the programs that are built, and one host's life with it in a bare root."""

import re

from harness import settings
from harness.processes import run

SCRIPT = settings.ROOT / "scripts" / "package"
VERSION = re.search(r'^version = "(.*)"$', (settings.ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
NEXT = f"{VERSION}+next"
MACHINE = "x86_64"
# Those of a host.
NAMES = ("freeflow", "freeflow-libs")
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "rsocket/librspreload.so")

# `freeflow up`, a container, a dead router, `up` again, `down`. Containers see their device, and find the library.
LIFE = """
freeflow --version
test -z "$(freeflow doctor | grep -E '^(router|library) .*missing' || true)"
freeflow up {options}
freeflow run --name a -d -- sleep 600
test -e /etc/cdi/freeflow.json
freeflow exec a -- sh -euc 'test -e /sys/class/infiniband/freeflow0/node_guid; test -S /run/freeflow/router.sock'
freeflow run --rm -- {load}
kill -9 "$(cat /run/freeflow/router.pid)"
while kill -0 "$(cat /run/freeflow/router.pid)" 2>/dev/null; do sleep 0.05; done
freeflow up {options} | grep 'is up on host'
freeflow ps | grep '^a '
freeflow down --force
echo ended well
"""
LOAD = "perl -MDynaLoader -e 'DynaLoader::dl_load_file(q(libibverbs.so.1)) or die DynaLoader::dl_error()'"


def life(options="", loads=True):
    return LIFE.format(options=options, load=LOAD if loads else "true")


def make(output, *kinds, version=VERSION, options=(), seconds=300, dist=None):
    """The files, by their names."""
    words = [SCRIPT, "--dist", dist or settings.DIST, "--output", output, "--version", version, *options, *kinds]
    run(words, seconds)
    return {path.name: path for path in output.iterdir()}


def deb_names(version=VERSION, names=NAMES):
    return [f"{name}_{version}-1_amd64.deb" for name in names]
