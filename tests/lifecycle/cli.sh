#!/usr/bin/env bash
# The command's life of containers, end to end: two containers that reach each other over TCP, exit codes, signals,
# background containers, isolation, and what happens after a kill -9. Needs root; uses a run directory of its own.
#
#   tests/lifecycle/cli.sh [NAME…]        (default: all tests)
set -uo pipefail
cd "$(dirname "$0")/../.."

bin=${FREEFLOW_DIST:-$PWD/dist}/bin
[ "$(id -u)" = 0 ] || { echo "cli.sh: these tests make namespaces: run them as root" >&2; exit 1; }
[ -x "$bin/freeflow" ] || { echo "cli.sh: $bin/freeflow is not built: run make" >&2; exit 1; }
for program in ip python3 setpriv; do
    command -v $program >/dev/null || { echo "cli.sh: $program is missing (scripts/install-deps)" >&2; exit 1; }
done

work=$(mktemp -d /tmp/freeflow-cli.XXXXXX)
run_dir=$work/run
passed=0 failed=0

freeflow() { timeout --kill-after=5 60 "$bin/freeflow" --run-dir "$run_dir" "$@"; }
# As a child whose PID is the command's own, for signals.
start() { "$bin/freeflow" --run-dir "$run_dir" run "$@" & }
field() { freeflow ps -a -o json | python3 -c "
import json, sys
rows = [row for row in json.load(sys.stdin) if row['name'] == sys.argv[1]]
print(rows[0][sys.argv[2]] if rows else 'absent')" "$1" "$2"; }
fail() { echo "    $*"; return 1; }
equal() { [ "$1" = "$2" ] || fail "$3: expected '$2', got '$1'"; }
contains() { [[ $1 == *"$2"* ]] || fail "$3: '$2' is not in: $1"; }
# Waits at most 10 s for a condition.
await() {
    local end=$((SECONDS + 10))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { fail "waited in vain for: $*"; return 1; }
        sleep 0.02
    done
}
gone() { ! kill -0 "$1" 2>/dev/null; }

clean_up() {
    trap - EXIT
    trap '' INT TERM HUP # once
    freeflow down --force >/dev/null 2>&1
    rm -rf "$work"
}
trap clean_up EXIT
trap 'clean_up; exit 130' INT
trap 'clean_up; exit 143' TERM HUP

# ---- tests

up_twice() {
    local first second
    first=$(freeflow status -o json | python3 -c 'import json,sys; print(json.load(sys.stdin)["pid"])')
    freeflow up >/dev/null || return
    second=$(freeflow status -o json | python3 -c 'import json,sys; print(json.load(sys.stdin)["pid"])')
    equal "$second" "$first" "the router's process" || return
    contains "$(freeflow up --mode fastpath 2>&1)" "first: freeflow" "up with another mode"
}

static_program() {
    ! python3 - "$bin/freeflow" <<'END' || fail "the program has a dynamic loader"
import struct, sys
data = open(sys.argv[1], "rb").read()
offset, = struct.unpack_from("<Q", data, 32)
size, count = struct.unpack_from("<HH", data, 54)
sys.exit(not any(struct.unpack_from("<I", data, offset + size * i)[0] == 3 for i in range(count)))
END
}

tcp_between_two() {
    local ip output
    freeflow run -d --name server -- python3 -c '
import socket
listener = socket.create_server(("", 7000))
print("listening", flush=True)
peer, address = listener.accept()
peer.sendall(b"from " + address[0].encode())' >/dev/null || return
    await eval '[[ $(freeflow logs server) == *listening* ]]' || return
    ip=$(field server ip)
    output=$(freeflow run --rm --name client -- python3 -c '
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), 10)
print(peer.recv(100).decode(), peer.getsockname()[0])' "$ip") || return
    # No address translation between: the server saw the client's own address.
    local words
    read -ra words <<<"$output"
    equal "${words[1]}" "${words[2]}" "the client's address" || return
    freeflow rm -f server >/dev/null
}

exit_codes() {
    local pair
    for pair in "0:true" "42:exit 42" "143:kill -TERM \$\$" "137:kill -KILL \$\$" "138:kill -USR1 \$\$"; do
        freeflow run --rm -- sh -c "${pair#*:}" >/dev/null 2>&1
        equal $? "${pair%%:*}" "${pair#*:}" || return
    done
    freeflow run --rm -- no-such-program 2>/dev/null
    equal $? 127 "a program that is not there" || return
    freeflow run --rm -- /etc/passwd 2>/dev/null
    equal $? 126 "a file that is no program" || return
    freeflow run --rm --network nowhere -- true 2>/dev/null
    equal $? 125 "a network that is not there" || return
    equal "$(freeflow ps -a -o json)" "[]" "containers left over"
}

signals() {
    local signal pid
    for signal in INT TERM HUP USR1 USR2 QUIT RTMIN+1; do
        start --rm --share-host --name trap -- sh -c "trap 'exit 33' $signal; echo ready >$work/ready; while :; do sleep 0.02; done"
        pid=$!
        await test -s "$work/ready" || return
        rm "$work/ready"
        kill -"$signal" $pid
        wait $pid
        equal $? 33 "SIG$signal" || return
    done
    # One without a handler ends the command, though PID 1 of the container is spared signals without handlers.
    start --rm --name plain -- sleep 60
    pid=$!
    await eval '[ "$(field plain status)" = running ]' || return
    kill -TERM $pid
    wait $pid
    equal $? 143 "SIGTERM to sleep"
}

background() {
    local output
    output=$(freeflow run -d --name job -e COLOUR=green -w /tmp -- sh -c 'echo $COLOUR $PWD; echo wrong >&2; sleep 60')
    equal "$output" job "run -d prints" || return
    equal "$(field job status)" running "status" || return
    await eval '[[ $(freeflow logs job) == *wrong* ]]' || return
    equal "$(freeflow logs job)" $'green /tmp\nwrong' "logs" || return
    contains "$(freeflow rm job 2>&1)" "is running" "rm of a running one" || return
    freeflow exec job -- sh -c 'exit 5'
    equal $? 5 "exec" || return
    equal "$(freeflow exec -e A=b job -- sh -c 'echo $COLOUR $A $PWD $(hostname)')" "green b /tmp job" "exec's view" || return
    freeflow stop -t 5 job >/dev/null || return
    equal "$(field job exit_code)" 143 "exit code after stop" || return
    contains "$(freeflow exec job -- true 2>&1)" "not running" "exec in an ended one" || return
    freeflow rm job >/dev/null && equal "$(field job status)" absent "after rm"
    contains "$(freeflow run -d -- no-such-program 2>&1)" "no such program" "run -d prints why not"
}

stop_kills() {
    freeflow run -d --name stubborn -- sh -c 'trap "" TERM; while :; do sleep 0.05; done' >/dev/null || return
    freeflow stop -t 1 stubborn >/dev/null || return
    equal "$(field stubborn exit_code)" 137 "exit code" || return
    freeflow rm stubborn >/dev/null
}

init_reaps() {
    # An orphan is adopted and reaped by PID 1; background processes end with the command.
    local output
    output=$(freeflow run --rm -- sh -c '(sleep 0.01 &); for _ in $(seq 100); do sleep 0.1; ps -e -o stat= | grep -q Z || break; done
        ps -e -o stat= | grep -c Z; sleep 600 & echo done')
    equal "$output" $'0\ndone' "zombies"
}

names_and_addresses() {
    local ip
    freeflow run -d --name taken -- sleep 60 >/dev/null || return
    ip=$(field taken ip)
    contains "$(freeflow run --name taken -- true 2>&1)" "already" "the same name" || return
    contains "$(freeflow run --ip "$ip" -- true 2>&1)" "$ip" "the same address" || return
    contains "$(freeflow run --ip 192.0.2.9 -- true 2>&1)" "192.0.2.9" "an address of elsewhere" || return
    contains "$(freeflow run --name ../x -- true 2>&1)" "can't be a container's name" "a bad name" || return
    freeflow rm -f taken >/dev/null
}

many_at_once() {
    local number pids=() addresses
    for number in $(seq 12); do
        freeflow run -d -- sleep 60 >"$work/name.$number" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || { fail "one of twelve did not start"; return 1; }
    done
    addresses=$(freeflow ps -o json | python3 -c '
import json, sys
rows = json.load(sys.stdin)
print(len(rows), len({row["ip"] for row in rows}), len({row["name"] for row in rows}))')
    equal "$addresses" "12 12 12" "containers, addresses, names" || return
    cat "$work"/name.* | xargs "$bin/freeflow" --run-dir "$run_dir" rm -f >/dev/null
}

isolation() {
    local output
    freeflow run -d --name other -- sleep 60 >/dev/null || return
    output=$(freeflow run --rm --name inside -- python3 - "$run_dir" 2>&1 <<'END'
import ctypes, os, socket, sys
run_dir = sys.argv[1]
assert sorted(os.listdir("/run/freeflow")) == ["router.sock", "sysfs"], os.listdir("/run/freeflow")
assert os.listdir(run_dir) == [], os.listdir(run_dir)
for path in (run_dir + "/admin.sock", "/run/freeflow/admin.sock"):
    try:
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path)
        raise SystemExit("reached " + path)
    except FileNotFoundError:
        pass
pids = [name for name in os.listdir("/proc") if name.isdigit()]
assert len(pids) <= 3, pids
libc = ctypes.CDLL(None, use_errno=True)
assert libc.umount2(run_dir.encode(), 2) == -1 and libc.umount2(b"/run/freeflow", 2) == -1
for path in ("/proc/sys/kernel/hostname", "/sys/kernel/uevent_seqnum"):
    try:
        open(path, "w")
        raise SystemExit("may write " + path)
    except OSError:
        pass
try:
    os.mknod("/tmp/freeflow-node-%d" % os.getpid(), 0o20666, os.makedev(1, 3))
    raise SystemExit("may make device nodes")
except PermissionError:
    pass
assert sorted(os.listdir("/sys/class/net")) == ["ff0", "lo"]
assert socket.gethostname() == "inside"
assert all(not os.readlink("/proc/self/fd/" + fd).startswith("/") or int(fd) < 3 or fd == fds[-1]
           for fds in [sorted(os.listdir("/proc/self/fd"), key=int)] for fd in fds[:-1])
print("isolated")
END
    )
    equal "$output" isolated "inside" || return
    freeflow rm -f other >/dev/null
}

volumes() {
    mkdir -p "$work/data"
    echo outside >"$work/data/file"
    local output
    output=$(freeflow run --rm -v "$work/data:/mnt:ro" -- sh -c 'cat /mnt/file; touch /mnt/new 2>/dev/null || echo refused')
    equal "$output" $'outside\nrefused' "a read-only volume" || return
    freeflow run --rm -v "$work/data:/mnt" -- touch /mnt/new && [ -e "$work/data/new" ] || fail "a volume is not written"
    contains "$(freeflow run --rm -v "$work/none:/mnt" -- true 2>&1)" "there is no" "a source that is not there"
}

supervisor_killed() {
    local supervisor init
    freeflow run -d --name orphan -- sleep 600 >/dev/null || return
    supervisor=$(field orphan supervisor_pid) init=$(field orphan init_pid)
    kill -9 "$supervisor"
    await gone "$init" || return
    equal "$(field orphan status) $(field orphan exit_code)" "exited 137" "the record" || return
    equal "$(freeflow status -o json | python3 -c 'import json,sys; print(len(json.load(sys.stdin)["vnics"]))')" 0 "vNICs" || return
    freeflow rm orphan >/dev/null
}

router_killed() {
    local pid ip before after
    freeflow run -d --name survivor -- sleep 600 >/dev/null || return
    freeflow run -d --name victim -- sleep 600 >/dev/null || return
    ip=$(field survivor ip)
    pid=$(freeflow status -o json | python3 -c 'import json,sys; print(json.load(sys.stdin)["pid"])')
    before=$(freeflow exec survivor -- stat -c %i /run/freeflow)
    kill -9 "$pid" && await gone "$pid" || return
    contains "$(freeflow status 2>&1)" "no router is running" "status" || return
    # Meanwhile a container ends, whose supervisor has no router to report to.
    freeflow stop -t 1 victim >/dev/null || return
    freeflow up >/dev/null || return
    after=$(freeflow status -o json | python3 -c '
import json, sys
print(*sorted(vnic["name"] + " " + vnic["address"] for vnic in json.load(sys.stdin)["vnics"]))')
    equal "$after" "survivor $ip" "vNICs after the restart" || return
    equal "$(freeflow exec survivor -- stat -c %i /run/freeflow)" "$before" "the vNIC's directory" || return
    freeflow exec survivor -- python3 -c '
import socket
socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("/run/freeflow/router.sock")' || return
    freeflow rm -f survivor victim >/dev/null
}

down_refuses() {
    freeflow run -d --name alive -- sleep 600 >/dev/null || return
    contains "$(freeflow down 2>&1 </dev/null)" "alive" "down with a live container" || return
    freeflow down --force >/dev/null || return
    [ -z "$(ip -o link | grep -F "$(bridge)")" ] || fail "the bridge is left" || return
    freeflow down >/dev/null || return
    freeflow up >/dev/null || return
    freeflow rm alive >/dev/null
}
bridge() { python3 -c '
import sys
value = 0xcbf29ce484222325
for byte in sys.argv[1].encode():
    value = ((value ^ byte) * 0x100000001b3) & (2**64 - 1)
print("ff-%08x" % (value & 0xffffffff))' "$run_dir"; }

nothing_left() {
    equal "$(freeflow ps -a -o json)" "[]" "containers" || return
    freeflow down >/dev/null || return
    [ -z "$(ip -o link | grep -F "$(bridge)")" ] || fail "the bridge is left" || return
    local left
    left=$(cd "$run_dir" && find . -type f -o -type s | grep -v -e lock -e router.log -e audit.log)
    equal "$left" "" "files"
}

tests=(up_twice static_program tcp_between_two exit_codes signals background stop_kills init_reaps names_and_addresses
    many_at_once isolation volumes supervisor_killed router_killed down_refuses nothing_left)
[ $# -gt 0 ] && tests=("$@")

freeflow up >/dev/null || exit 1
for test in "${tests[@]}"; do
    if "$test"; then
        echo "ok    ${test//_/ }"
        passed=$((passed + 1))
    else
        echo "FAIL  ${test//_/ }"
        failed=$((failed + 1))
        freeflow ps -o json | python3 -c 'import json,sys; print(*(row["name"] for row in json.load(sys.stdin)))' \
            | xargs -r "$bin/freeflow" --run-dir "$run_dir" rm -f >/dev/null 2>&1
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
