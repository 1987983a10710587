#!/usr/bin/env bash
# The CDI device in podman containers: unprivileged, images that are hostile or lack the library, clean environment of
# the hook, refusal with a reason, nothing left behind. Needs root and podman; without podman it says so and passes.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=${FREEFLOW_DIST:-$PWD/dist}/bin
[ "$(id -u)" = 0 ] || { echo "hook.sh: these tests make containers: run them as root" >&2; exit 1; }
[ -x "$bin/freeflow" ] || { echo "hook.sh: $bin/freeflow is not built: run make" >&2; exit 1; }
if ! command -v podman >/dev/null; then
    echo "podman is not installed: not tested"
    echo "0 passed, 0 failed"
    exit 0
fi
# A mount namespace of its own, where /etc/cdi is this host's: other hosts' devices have the same name.
if [ "${FREEFLOW_HOOK_TEST:-}" != inside ]; then
    FREEFLOW_HOOK_TEST=inside exec unshare --mount --propagation private "$0" "$@"
fi

work=$(mktemp -d /tmp/freeflow-hook.XXXXXX)
run_dir=$work/run
image=$work/image
passed=0 failed=0
mkdir -p "$work/cdi" /etc/cdi
mount --bind "$work/cdi" /etc/cdi

freeflow() { timeout --kill-after=5 60 "$bin/freeflow" --run-dir "$run_dir" "$@"; }
fail() { echo "    $*"; return 1; }
equal() { [ "$1" = "$2" ] || fail "$3: expected '$2', got '$1'"; }
contains() { [[ $1 == *"$2"* ]] || fail "$3: '$2' is not in: $1"; }
podman_run() {
    timeout --kill-after=5 90 podman --root "$work/storage" --runroot "$work/runroot" --runtime runc \
        --cgroup-manager cgroupfs --events-backend none run --rm --network "${network:-none}" \
        --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --device "freeflow.io/net=${device:-default}" "$@"
}
unprivileged=(--cap-drop all --user 1000 --security-opt no-new-privileges)

clean_up() {
    trap - EXIT
    trap '' INT TERM HUP # once
    freeflow down --force >/dev/null 2>&1
    umount /etc/cdi 2>/dev/null
    rm -rf "$work"
}
trap clean_up EXIT
trap 'clean_up; exit 130' INT
trap 'clean_up; exit 143' TERM HUP

# A small image: a shell, some programs and the libraries they need, but no libibverbs.
make_image() {
    rm -rf "$image"
    mkdir -p "$image"/{bin,usr/bin,usr/lib/x86_64-linux-gnu,lib64,etc,proc,sys,dev,tmp,run}
    ln -s usr/lib "$image/lib"
    local program
    for program in sh ls cat ibv_devices; do
        cp -L "$(command -v $program)" "$image/bin/"
        ldd "$(command -v $program)" | awk '$3 ~ /^\// { print $3 }' | grep -v libibverbs \
            | xargs -I{} cp -Ln {} "$image/usr/lib/x86_64-linux-gnu/"
    done
    cp -L /lib/x86_64-linux-gnu/libgcc_s.so.1 "$image/usr/lib/x86_64-linux-gnu/"
    cp -L /lib64/ld-linux-x86-64.so.2 "$image/lib64/"
}

vnic_count() { freeflow status -o json | grep -c '"directory"'; }

# ---- tests

unprivileged_in_own_root() {
    local output
    output=$(podman_run "${unprivileged[@]}" --rootfs /:O sh -c 'ls /run/freeflow; ls /sys/class/net; ibv_devices' 2>&1) || {
        fail "$output"
        return
    }
    contains "$output" $'router.sock\nsysfs\nff0\nlo\n' "its directory and interfaces" || return
    contains "$output" freeflow0 "the device" || return
    equal "$(vnic_count)" 0 "vNICs after its end"
}

host_socket_is_out_of_reach() {
    # This container sees all files of the machine, as root, and still reaches no other socket.
    local output
    output=$(podman_run --rootfs /:O python3 -c "
import socket
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect('$run_dir/admin.sock')
    print('reached')
except OSError as error:
    print('refused')" 2>/dev/null)
    equal "$output" refused "the admin socket"
}

image_without_library() {
    make_image
    local output
    output=$(podman_run "${unprivileged[@]}" --rootfs "$image:O" ibv_devices 2>&1) || { fail "$output"; return; }
    contains "$output" freeflow0 "the device" || return
    # A program may load it by name.
    podman_run "${unprivileged[@]}" --rootfs "$image:O" cat /usr/lib/x86_64-linux-gnu/librdmacm.so.1 2>/dev/null |
        cmp -s - "${bin%/bin}/lib/librdmacm.so.1" || fail "librdmacm.so.1 is not the drop-in"
}

hostile_links() {
    make_image
    # Links that lead out of the image if followed by name.
    mkdir -p "$work/bait/lib" "$work/bait/run"
    touch "$work/bait/lib/libibverbs.so.1"
    local up="../../../../../../../../../.."
    rmdir "$image/run"
    ln -s "$up$work/bait/run" "$image/run"
    ln -s "$up$work/bait/lib/libibverbs.so.1" "$image/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    ln -s /proc/1/root/tmp "$image/usr/lib64"
    mkfifo "$image/etc/ld.so.conf"
    podman_run "${unprivileged[@]}" --rootfs "$image:O" ls / >"$work/output" 2>&1
    [ -z "$(ls -A "$work/bait/run")" ] || fail "something was made outside of the image" || return
    [ ! -s "$work/bait/lib/libibverbs.so.1" ] || fail "something was mounted outside of the image" || return
    ! grep -q "$work/bait" /proc/self/mountinfo || fail "a mount outside of the image" || return
    equal "$(vnic_count)" 0 "vNICs after its end"
}

musl_is_refused() {
    make_image
    mv "$image/lib64/ld-linux-x86-64.so.2" "$image/usr/lib/ld-musl-x86_64.so.1"
    contains "$(podman_run --rootfs "$image:O" ls / 2>&1)" "needs glibc" "the reason" || return
    equal "$(vnic_count)" 0 "vNICs after the refusal"
}

hook_has_a_clean_environment() {
    # If the container's LD_PRELOAD reached the hook, the loader would complain; and the hook is static besides.
    local output
    output=$(podman_run --env LD_PRELOAD=/no/such/library.so --env FREEFLOW_LIBDIR=/nowhere --env FREEFLOW_RUN_DIR=/nowhere \
        --rootfs /:O true 2>&1) || { fail "$output"; return; }
    local count
    count=$(grep -o '"env"' "$work/cdi/freeflow.json" | wc -l)
    equal "$count" "$(grep -o '"hookName"' "$work/cdi/freeflow.json" | wc -l)" "hooks with an environment of their own"
}

host_network_gets_no_interface() {
    local before after
    # Interfaces of other tests come and go.
    before=$(ip -o link | grep -cv ': \(ff\|veth\)')
    after=$(network=host podman_run --rootfs /:O sh -c 'ip -o link | grep -cv ": \(ff\|veth\)"; ls /run/freeflow' 2>/dev/null)
    equal "$after" "$before"$'\nrouter.sock\nsysfs' "interfaces, and its directory"
}

another_network() {
    printf '{"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": "red"}, "spec": {"cidrs": ["10.50.0.0/24"]}}' |
        freeflow apply -f - || return
    local output
    output=$(device=red podman_run --annotation freeflow.io/label.tier=web --rootfs /:O \
        sh -c 'ibv_devices; ip -4 -o address; ip route' 2>&1) || { fail "$output"; return; }
    contains "$output" freeflow0 "the device" || return
    contains "$output" "inet 10.50.0." "its address" || return
    [[ $output != *default* ]] || fail "it has a way out: $output" || return
    equal "$(vnic_count)" 0 "vNICs after its end" || return
    freeflow delete network red >/dev/null || return
    contains "$(device=red podman_run --rootfs /:O true 2>&1)" "unresolvable" "the reason"
}

# Within ten seconds. Where nobody takes its exit status, a process that has ended stays as a zombie.
ended() {
    for _ in $(seq 500); do
        [ -e "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null || return 0
        sleep 0.02
    done
    return 1
}

router_away() {
    local pid
    pid=$(freeflow status -o json | awk '$1 == "\"pid\":" { gsub(/,/, "", $2); print $2; exit }')
    kill -9 "$pid"
    ended "$pid" || { fail "it does not end"; return; }
    contains "$(podman_run --rootfs /:O true 2>&1)" "bring the host up" "the reason" || return
    freeflow up --cdi-dir /etc/cdi >/dev/null
}

killed_container_is_settled() {
    # However it ended, nothing of it is left.
    local pid
    podman_run --rootfs /:O sleep 600 >/dev/null 2>&1 &
    for _ in $(seq 100); do
        pid=$(freeflow ps -o json | awk '$1 == "\"pid\":" { gsub(/,/, "", $2); print $2; exit }')
        [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = sleep ] && break
        sleep 0.1
    done
    [ -n "$pid" ] || fail "ps does not show it" || return
    kill -9 "$pid"
    wait $!
    freeflow up --cdi-dir /etc/cdi >/dev/null || return
    equal "$(vnic_count)" 0 "vNICs" || return
    equal "$(freeflow ps -o json)" "[]" "containers"
}

tests=(unprivileged_in_own_root host_socket_is_out_of_reach image_without_library hostile_links musl_is_refused
    hook_has_a_clean_environment host_network_gets_no_interface another_network router_away killed_container_is_settled)
[ $# -gt 0 ] && tests=("$@")

freeflow up --cdi-dir /etc/cdi >/dev/null || exit 1
if ! podman_run --rootfs /:O true >"$work/output" 2>&1; then
    cat "$work/output"
    echo "podman can't run a container with the device here"
    echo "0 passed, 1 failed"
    exit 1
fi
for test in "${tests[@]}"; do
    if "$test"; then
        echo "ok    ${test//_/ }"
        passed=$((passed + 1))
    else
        echo "FAIL  ${test//_/ }"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
