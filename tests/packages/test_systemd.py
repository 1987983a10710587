"""The package under systemd, in an emulated guest that boots a bare Debian root. Part of `make test-packages`."""

import re

import pytest

import harness
from harness import need, packages, rxe_guest
from harness.packages import NEXT, VERSION, deb_names
from harness.roots import SYSTEMD, Root
from harness.settings import TESTS

SECONDS = 1200
INSIDE = TESTS / "packages" / "systemd_inside.sh"
PROMISES = re.findall(r"^kept (\S+)", INSIDE.read_text(), re.M)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By the guest, which boots once."""
    output = tmp_path_factory.mktemp("packages")
    quick = ("--level", "0", "--without-symbols")
    made = {**packages.make(output, "deb", options=quick), **packages.make(output, "deb", version=NEXT, options=quick)}
    with Root(SYSTEMD) as root:
        for directory, version in (("first", VERSION), ("second", NEXT)):
            root.file(f"/root/{directory}").mkdir()
            for name in deb_names(version):
                made[name].rename(root.file(f"/root/{directory}/{name}"))
        root.file("/root/inside.sh").write_text(INSIDE.read_text())
        harness.run([rxe_guest.SCRIPT, "--packages", "--modules", root.path], 300)
        command = [rxe_guest.SCRIPT, "--seconds", SECONDS, "--systemd", root.path, "--", "/bin/sh", "/root/inside.sh"]
        return harness.run(command, SECONDS + 60, codes=range(256))


@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("promise", PROMISES)
def test_under_systemd(said, promise):
    need(f"kept: {promise}\n" in said, said)
