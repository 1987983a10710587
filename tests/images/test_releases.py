"""Root file systems of Linux releases, with their own ibv_devinfo, ibv_rc_pingpong and perftest on the drop-ins,
and the table of docs/IMAGES.md, which this file makes (`--update` writes it). `make test-images`; not in `make test`, as
it downloads. Of a release whose root cannot be had here only the versions of symbols are compared, and the table says so.
"""

import re

import pytest

from harness import images, need, podman, run
from harness.settings import DIST, ROOT

DOCUMENT = ROOT / "docs/IMAGES.md"
BEGIN, END = "<!-- releases: made by tests/images/test_releases.py -->\n", "<!-- end of releases -->\n"
HEAD = "| release | glibc | rdma-core | how it was tested |\n|---|---|---|---|\n"
ROOTS = {"bullseye": "Debian 11", "bookworm": "Debian 12", "trixie": "Debian 13"}
# Facts of releases without a root: glibc, and the first and last rdma-core that they had.
WITHOUT_ROOT = {
    "RHEL 7.9": ("2.17", 22, 22), "RHEL 8": ("2.28", 22, 48), "RHEL 9.0": ("2.34", 37, 37),
    "Ubuntu 18.04": ("2.27", 17, 17), "Ubuntu 20.04": ("2.31", 28, 28), "Ubuntu 22.04": ("2.35", 39, 39),
    "Ubuntu 24.04": ("2.39", 50, 50), "Debian 10": ("2.28", 22, 22),
}
# First release of rdma-core with each number of the private symbol node.
PRIVATE_NODES = (17, 18, 19, 20, 21, 22, 25, 33, 34, 57, 59, 64, 65)
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "rsocket/librspreload.so")
RAN = "works: `ibv_devinfo`, `ibv_rc_pingpong` and `ib_write_bw` of the release; root also read-only"
COMPARED = "symbol versions only"
rows = {}


@pytest.fixture(scope="module")
def engine():
    with podman.on_own_host() as engine:
        yield engine


def numbers(version):
    return [int(number) for number in version.split(".")]


def check_versions(glibc, first, last):
    """Whether an image's C library has what the drop-ins want, and they what its providers want."""
    for name in LIBRARIES:
        wanted = re.findall(r"Name: GLIBC_([\d.]+)", run(["readelf", "--version-info", "--wide", DIST / "lib" / name]))
        newest = max(wanted, key=numbers)
        need(numbers(newest) <= numbers(glibc), f"{name} wants glibc {newest}, and it has {glibc}")
    exported = run(["readelf", "--dyn-syms", "--wide", DIST / "lib/libibverbs.so.1"])
    for release in range(first, last + 1):
        node = max(number for number in PRIVATE_NODES if number <= release)
        need(f"verbs_register_driver_{node}@IBVERBS_PRIVATE_{node}\n" in exported, f"node {node} is missing")


@pytest.mark.parametrize("release", ROOTS)
def test_release(engine, release):
    root = images.cached(release)
    glibc, rdma_core = images.glibc_of(root), images.rdma_core_of(root)
    check_versions(glibc, rdma_core, rdma_core)
    for options in ((), images.READ_ONLY):
        need("freeflow0" in images.inside(engine, root, "ibv_devinfo", "-v", options=options), "no device")
        images.pair(engine, root, ["ibv_rc_pingpong", "-g", "0", "-c"], "1000 iters in", options=options)
    # perftest is linked with provider libraries of the same release.
    images.pair(engine, root, ["ib_write_bw", "-F", "-n", "200", "-s", "4096"], r"\b4096\s+200\s")
    rows[ROOTS[release]] = (glibc, rdma_core, RAN)


@pytest.mark.parametrize("release", WITHOUT_ROOT)
def test_versions(release):
    glibc, first, last = WITHOUT_ROOT[release]
    check_versions(glibc, first, last)
    rows[release] = (glibc, str(first) if first == last else f"{first} to {last}", COMPARED)


def test_table(request):
    """Last: of all that ran before."""
    names = sorted([*ROOTS.values(), *WITHOUT_ROOT], key=lambda name: (name.split()[0], numbers(name.split()[1])))
    missing = [name for name in names if name not in rows]
    need(not missing, f"nothing is known of {missing}: run the whole file")
    table = HEAD + "".join(f"| {name} | {' | '.join(map(str, rows[name]))} |\n" for name in names)
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    need(end, f"{DOCUMENT} has no place for the table")
    if request.config.getoption("--update"):
        DOCUMENT.write_text(before + BEGIN + table + END + after)
        return
    need(old == table, f"{DOCUMENT} has another table (--update writes it):\n{table}")
