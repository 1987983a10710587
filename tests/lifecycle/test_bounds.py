"""Run directories are bounded: the router's log is rotated, a full file system stops nobody, and vNICs leave
room to others."""

import os
import pathlib
import subprocess
import tempfile

import pytest

import harness
from harness import need
from harness.settings import DIST

LOG_BYTES_MAX = 8 << 20
LOG_COUNT = 4
SIZE_MIB = 32


def freeflow(run_dir, *words, codes=(0,), text=None):
    command = [str(DIST / "bin" / "freeflow"), "--run-dir", str(run_dir), *map(str, words)]
    process = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    need(process.returncode in codes, f"{' '.join(command)}: {process.returncode}: {process.stdout}{process.stderr}")
    return process.stdout + process.stderr


def vnic(name):
    return f"apiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {{name: {name}}}\nspec: {{network: default}}\n"


def rotated(directory):
    """A log that is full when the router begins, and one more each time: no line is lost, the oldest file goes."""
    run_dir = directory / "rotate"
    run_dir.mkdir()
    log = run_dir / "router.log"
    for number in range(LOG_COUNT + 1):
        marker = f"filler {number}\n"
        with log.open("ab") as file:
            file.write(marker.encode())
            # Sparse: it is its length that counts.
            file.truncate(LOG_BYTES_MAX)
        freeflow(run_dir, "up")
        try:
            freeflow(run_dir, "apply", "-f", "-", text=vnic(f"v{number}"))
        finally:
            freeflow(run_dir, "down", "--force")
        need(log.stat().st_size < LOG_BYTES_MAX, "the log was not rotated")
        text = log.read_text()
        # The new file has what came after, of this very router.
        need("vNIC attached" in text and f"vnic=v{number}" in text and "router ends" in text, text)
        before = pathlib.Path(f"{log}.1").read_bytes()
        need(marker.encode() in before and b"router ends" not in before.replace(b"\0", b"").split(marker.encode())[1],
             "the old file has lines of the new one's time")
    found = sorted(path.name for path in run_dir.glob("router.log*"))
    need(found == ["router.log", "router.log.1", "router.log.2", "router.log.3"], f"files: {found}")


def full(directory):
    """The run directory's file system has no room: vNICs are refused with the reason, and the router goes on, and logs again."""
    run_dir = directory / "small"
    run_dir.mkdir()
    harness.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(run_dir)])
    try:
        freeflow(run_dir, "up")
        freeflow(run_dir, "apply", "-f", "-", text=vnic("first"))
        with (run_dir / "ballast").open("wb") as file:
            left = os.statvfs(run_dir)
            file.write(bytes(left.f_bavail * left.f_frsize - (SIZE_MIB << 18)))
        refusal = freeflow(run_dir, "apply", "-f", "-", text=vnic("second"), codes=(1, 3))
        need("too little room" in refusal and "KiB are free" in refusal, refusal)
        need("second" not in freeflow(run_dir, "get", "vnics"), "it is there")
        # To the last byte: what the router logs now does not fit.
        with (run_dir / "more").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        log = run_dir / "router.log"
        freeflow(run_dir, "apply", "-f", "-", text=vnic("second"), codes=(1, 3))
        freeflow(run_dir, "delete", "vnic", "first", codes=(0, 1, 4))
        need("adaptive" in freeflow(run_dir, "status"), "the router does not answer")
        (run_dir / "ballast").unlink()
        (run_dir / "more").unlink()
        freeflow(run_dir, "apply", "-f", "-", text=vnic("third"))
        need("vnic=third" in log.read_text(), log.read_text()[-2000:])
    finally:
        freeflow(run_dir, "down", "--force")
        harness.run(["umount", str(run_dir)])


def many(directory):
    """Far more than the file system has inodes for, in one request and one by one: refused before anything is made."""
    run_dir = directory / "inodes"
    run_dir.mkdir()
    harness.run(["mount", "-t", "tmpfs", "-o", "size=256m,nr_inodes=1200", "tmpfs", str(run_dir)])
    try:
        freeflow(run_dir, "up")
        free = os.statvfs(run_dir).f_favail
        refusal = freeflow(run_dir, "apply", "-f", "-", text="---\n".join(vnic(f"v{number}") for number in range(50)),
                           codes=(1, 3))
        need("few inodes" in refusal, refusal)
        need(os.statvfs(run_dir).f_favail == free, "something was made")
        made = 0
        while made < 50:
            answer = freeflow(run_dir, "apply", "-f", "-", text=vnic(f"w{made}"), codes=(0, 1, 3))
            if "created" not in answer:
                need("few inodes" in answer, answer)
                break
            made += 1
        need(1 <= made < 10, f"{made} vNICs were made")
        need(os.statvfs(run_dir).f_favail >= 1200 // 4, "others have no room left")
        return f"{made} fit"
    finally:
        freeflow(run_dir, "down", "--force")
        harness.run(["umount", str(run_dir)])


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="freeflow-test.") as directory:
        yield pathlib.Path(directory)


def test_router_log_is_rotated(directory):
    rotated(directory)


def test_full_file_system_stops_nobody(directory):
    full(directory)


def test_more_vnics_than_there_is_room_for(directory):
    many(directory)
