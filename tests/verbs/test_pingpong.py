"""Debian's ibverbs-utils, unmodified, each end in its own `freeflow run` container."""

import time

import pytest

import harness
from harness import need, pingpong


def devinfo(container):
    text = container.exec("ibv_devinfo", "-v")
    for wanted in ("freeflow0", "PORT_ACTIVE", "Ethernet", f"::ffff:{container.ip}", "RoCE v2", "active_mtu"):
        need(wanted in text, f"'{wanted}' is not in:\n{text}")
    need("0x02c9" not in text, "the device claims to be a Mellanox one")


def devices(container):
    text = container.exec("ibv_devices")
    need("freeflow0" in text, text)


def asyncwatch(container):
    watch = container.start("ibv_asyncwatch")
    watch.wait_for_output("freeflow0")
    time.sleep(0.2)
    need(watch.process.poll() is None, f"ibv_asyncwatch ended:\n{watch.output()}")
    watch.kill()


def pingpongs():
    """The words of each."""
    for kind in ("rc", "uc", "ud", "srq"):
        # -g 0: these four never look for a GID by themselves, on any RoCE device.
        for options in ("", "-e", "-s 1024 -n 3000"):
            yield f"ibv_{kind}_pingpong -g 0 {options}"
    for options in ("-N", "-t", "-c", "-s 1048576 -n 200 -m 4096", "-o", "-O", "-o -P", "-j", "-t -o -N", "-t -j -N -c",
                    "-O -P -e -c"):
        yield f"ibv_rc_pingpong -g 0 {options}"
    for options in ("-o", "-o -c"):
        yield f"ibv_srq_pingpong -g 0 {options}"
    for options in ("", "-e", "-o", "-s 65536 -n 200"):
        yield f"ibv_xsrq_pingpong -g 0 {options}"


@pytest.fixture(scope="module", autouse=True)
def programs():
    harness.require_commands("ibv_rc_pingpong", "ibv_devinfo", "ibv_asyncwatch")


@pytest.fixture
def looker(host):
    container = host.container("looker")
    yield container
    container.remove()


def test_ibv_devinfo(looker):
    devinfo(looker)


def test_ibv_devices(looker):
    devices(looker)


def test_ibv_asyncwatch(looker):
    asyncwatch(looker)


@pytest.mark.parametrize("words", [words.strip() for words in pingpongs()])
def test_pingpong(host, words):
    pingpong.run_pair(host, words.split())
