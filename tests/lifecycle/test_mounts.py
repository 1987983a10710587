"""Files that the host puts into a container stay the host's: its root can use them, not change them."""

import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile

import pytest

from harness import need

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")


def is_library(path, names=LIBRARIES):
    """A mount is on the file that a name links to, libibverbs.so.1.14.44.0 say."""
    return any(f"/{name}" in path for name in names)


def mounts(container):
    """Path and options of what FreeFlow mounted."""
    lines = (line.split() for line in container.exec("cat", "/proc/self/mountinfo").splitlines())
    found = [(fields[4], fields[5].split(",")) for fields in lines
             if is_library(fields[4]) or fields[4] == "/run/freeflow"]
    # Of several mounts on one path the last is seen.
    return list(dict(found).items())


def read_only(container):
    found = mounts(container)
    need(any(path == "/run/freeflow" for path, _ in found), f"no vNIC is mounted: {found}")
    for library in LIBRARIES:
        need(any(is_library(path, [library]) for path, _ in found), f"no {library} is mounted: {found}")
    for path, options in found:
        need("ro" in options and "nosuid" in options and "nodev" in options, f"{path} is mounted {options}")
    return f"{len(found)} mounts"


def refused(container, *command):
    code = subprocess.run(container.command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          timeout=60).returncode
    need(code != 0, f"the container could: {' '.join(command)}")


def directory(container):
    """Else a container could fill the host's tmpfs, or lay a trap where the next router binds its socket."""
    for command in (["touch", "/run/freeflow/x"], ["rm", "-f", "/run/freeflow/router.sock"],
                    ["ln", "-sf", "/etc/shadow", "/run/freeflow/router.sock"], ["chmod", "0700", "/run/freeflow"],
                    ["mount", "-o", "remount,bind,rw", "/run/freeflow"], ["umount", "/run/freeflow"]):
        refused(container, *command)


def library(container):
    for path, _ in mounts(container):
        if is_library(path):
            # Opened for writing, nothing written: it is everybody's.
            refused(container, "sh", "-c", f": >> {path}")
            refused(container, "chmod", "0666", path)
            refused(container, "umount", path)


def init_is_closed(container):
    """PID 1 was the host's process once."""
    refused(container, "readlink", "/proc/1/cwd")
    refused(container, "cat", "/proc/1/environ")


def works(container):
    need("freeflow0" in container.exec("ibv_devinfo"), "the device is gone")


# Whichever of these are mounts of their own, they are covered as well.
WRITABLE = ("/usr/bin", "/etc", "/tmp", "/var/tmp", "/root", "/run")


def own_files(host):
    """A container sees its own writes, also by exec; the host does not, nor the next container."""
    name, text = f"freeflow-mounts-{os.getpid()}", "the container's"
    kept = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-mounts."))
    kept.chmod(0o755)
    (kept / "file").write_text("the host's")
    try:
        host.freeflow("run", "-d", "--name", "own", "-v", f"{kept}:/mnt", "--", "sleep", "infinity")
        for directory in WRITABLE:
            host.freeflow("exec", "own", "--", "sh", "-c", f"echo \"{text}\" > {directory}/{name} && cat {directory}/{name}")
            need(not pathlib.Path(directory, name).exists(), f"{directory}/{name} is on the host")
        changes = f"echo changed > {kept}/file; cat {kept}/file; rm -r {kept}; ls {kept} || echo gone"
        output = host.freeflow("exec", "own", "--", "sh", "-c", changes)
        need("changed" in output and "gone" in output, output)
        need((kept / "file").read_text() == "the host's", "the container changed a file of the host's")
        host.freeflow("exec", "own", "--", "sh", "-c", "chmod 0700 /usr /etc /tmp; chown 1:1 /etc/passwd; echo x >> /etc/passwd")
        need(pathlib.Path("/etc/passwd").stat().st_uid == 0, "the container changed a file of the host's")
        # A volume is the host's, as it was asked for.
        host.freeflow("exec", "own", "--", "sh", "-c", "echo more > /mnt/volume")
        need((kept / "volume").read_text() == "more\n", "a volume was not written")
        for command in (["mount", "-o", "remount,rw", "/"], ["umount", "/"], ["umount", "/tmp"], ["mount", "-t", "tmpfs", "x", "/mnt"]):
            code = subprocess.run(host.command("exec", "own", "--", *command), capture_output=True, timeout=60).returncode
            need(code != 0, f"the container could: {' '.join(command)}")
        seen = host.freeflow("run", "--rm", "--", "sh", "-c", f"cat {kept}/file; ls /tmp/{name} || echo none")
        need("the host's" in seen and "none" in seen, seen)
    finally:
        host.freeflow("rm", "-f", "own", codes=(0, 1))
        shutil.rmtree(kept)


def chroot_stays_inside(host):
    """Its root has CAP_SYS_CHROOT, and the way out of a changed root leads to the container's own."""
    script = ("import os; os.mkdir('/tmp/jail'); fd = os.open('/', os.O_RDONLY); os.chroot('/tmp/jail'); os.fchdir(fd)\n"
              "for _ in range(64): os.chdir('..')\n"
              "os.chroot('.'); open('/tmp/freeflow-escaped', 'w').write('x')")
    host.freeflow("run", "--rm", "--", "python3", "-c", script)
    need(not pathlib.Path("/tmp/freeflow-escaped").exists(), "it wrote a file of the host's")


REACHES = """
import os, socket, sys
for directory in sys.argv[1:]:
    for name, reach in (("socket", lambda path: socket.socket(socket.AF_UNIX).connect(path)), ("node", lambda path: os.open(path, os.O_RDONLY))):
        try:
            reach(os.path.join(directory, name))
            print("reached", directory, name)
        except OSError as error:
            print(name, error.strerror)
"""


def devices_and_sockets(host):
    """Mounts of the host, in a mount namespace that goes with the command: neither a device nor, below /run, a service is reached."""
    names = [f"{place}/freeflow-mounts-{os.getpid()}" for place in ("/run", "/var/tmp")]
    directories = [f"{name}{below}" for name in names for below in ("", "/deep")]
    # The socket on a mount further below another place can be connected to: that is documented.
    asked = [directory for directory in directories if directory != f"{names[1]}/deep"]
    made = "".join(f"mkdir {path}; mount -t tmpfs tmpfs {path}; mknod {path}/node c 1 3 || exit 77; " for path in directories)
    listening = ("import socket, sys, time; all = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]\n"
                 "for one, path in zip(all, sys.argv[1:]): one.bind(path + '/socket'); one.listen()\n"
                 "print('listening', flush=True); time.sleep(60)")
    command = " ".join(shlex.quote(word) for word in host.command("run", "--rm", "--", "python3", "-c", REACHES, *asked))
    script = f"""set -e; {made}
python3 -c "{listening}" {' '.join(directories)} > {names[1]}/said & listener=$!
trap 'kill $listener' EXIT
while ! grep -q listening {names[1]}/said; do sleep 0.05; done
python3 -c {shlex.quote(REACHES)} {' '.join(asked)} | sed 's/^/host: /'
{command}"""
    try:
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
        if done.returncode == 77:
            return "no device can be made here"
        lines = done.stdout.splitlines()
        reached = [line for line in lines if line.startswith("host: reached")]
        need(done.returncode == 0 and len(reached) == 2 * len(asked), f"the host reaches {reached}:\n{done.stdout}{done.stderr}")
        inside = [line for line in lines if not line.startswith("host: ")]
        need(len(inside) == 2 * len(asked) and not any("reached" in line for line in inside), "\n".join(inside))
    finally:
        for name in names:
            pathlib.Path(name).rmdir()


def every_mount_is_kept(host):
    """No mount but the container's own, or a volume, can be written to through its own path on the host."""
    output = host.freeflow("run", "--rm", "--", "cat", "/proc/self/mountinfo")
    kinds = {}
    for line in output.splitlines():
        left, right = line.split(" - ")
        kinds[left.split()[4]] = (right.split()[0], left.split()[5].split(","))
    need(kinds["/"][0] == "overlay", f"the root is {kinds['/']}")
    own = ("overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue", "devtmpfs")
    loose = [path for path, (kind, options) in kinds.items() if kind not in own and "ro" not in options and
             not path.startswith("/dev/")]
    need(not loose, f"these can be written to: {loose}")


def shared_files(host):
    """Only where that was asked for."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="freeflow-mounts."))
    try:
        host.freeflow("run", "--rm", "--share-host", "--", "sh", "-c", f"echo x > {path}/file")
        need((path / "file").read_text() == "x\n", "it was not written")
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("promise", [own_files, every_mount_is_kept, devices_and_sockets, chroot_stays_inside, shared_files],
                         ids=["what a container writes is its own", "every mount of the host's is read-only or covered",
                              "no device or service of the host's is reached", "a changed root leads nowhere", "--share-host"])
def test_files_of_the_host(host, promise):
    promise(host)


@pytest.mark.parametrize("promise", [read_only, directory, library, init_is_closed, works],
                         ids=["FreeFlow's mounts are read-only", "the vNIC's directory can't be changed",
                              "the library can't be changed", "PID 1 can't be looked into", "and all works"])
def test_files_of_a_container(container, promise):
    promise(container)
