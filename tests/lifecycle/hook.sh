#!/usr/bin/env bash
# The CDI device in podman containers: unprivileged, images that are hostile or lack the library, clean environment of
# the hook, refusal with a reason, nothing left behind. Needs root and podman. test_hook.py makes a test of each name.
set -uo pipefail
cd "$(dirname "$0")/../.."

bin=${FREEFLOW_DIST:-$PWD/dist}/bin
[ "$(id -u)" = 0 ] || { echo "hook.sh: these tests make containers: run them as root" >&2; exit 1; }
[ -x "$bin/freeflow" ] || { echo "hook.sh: $bin/freeflow is not built: run make" >&2; exit 1; }
for program in podman runc; do
    command -v $program >/dev/null || { echo "hook.sh: $program is missing (scripts/install-deps)" >&2; exit 1; }
done
# A mount namespace of its own, where /etc/cdi is this host's: other hosts' devices have the same name.
if [ "${FREEFLOW_HOOK_TEST:-}" != inside ]; then
    FREEFLOW_HOOK_TEST=inside exec unshare --mount --propagation private "$PWD/tests/lifecycle/hook.sh" "$@"
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
        --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --device "freeflow.io/${kind:-net}=${device:-default}" "$@"
}
unprivileged=(--cap-drop all --user 1000 --security-opt no-new-privileges)

clean_up() {
    trap - EXIT
    trap '' INT TERM HUP # once
    freeflow down --force >/dev/null 2>&1
    umount /etc/cdi 2>/dev/null
    umount --lazy "$work/storage/overlay" 2>/dev/null
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
    for program in sh ls cat sleep ibv_devices; do
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

host_folders_stay_as_they_are() {
    # Folders of the host as volumes: nothing is made in them, neither a library nor the vNIC's directory.
    make_image
    mkdir -p "$work/libraries" "$work/bare" "$work/prepared/freeflow"
    cp -L "$image"/usr/lib/x86_64-linux-gnu/* "$work/libraries/"
    local before
    before=$(ls "$work/libraries")
    podman_run -v "$work/libraries:/usr/lib/x86_64-linux-gnu" --rootfs "$image:O" ls / >"$work/output" 2>&1 ||
        fail "$(cat "$work/output")" || return
    equal "$(ls "$work/libraries")" "$before" "the folder of libraries" || return
    podman_run -v "$work/bare:/run" --rootfs "$image:O" ls / >"$work/output" 2>&1 && { fail "it was started"; return; }
    contains "$(cat "$work/output")" "in a folder of the host" "the reason" || return
    equal "$(ls -A "$work/bare")" "" "the folder at /run" || return
    podman_run -v "$work/prepared:/run" --rootfs "$image:O" ls /run/freeflow >"$work/output" 2>&1 ||
        fail "$(cat "$work/output")" || return
    contains "$(cat "$work/output")" router.sock "its directory" || return
    equal "$(cd "$work/prepared" && find . -mindepth 1)" ./freeflow "the folder at /run" || return
    equal "$(vnic_count)" 0 "vNICs"
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
    output=$(device=red podman_run --rootfs /:O \
        sh -c 'ibv_devices; ip -4 -o address; ip route' 2>&1) || { fail "$output"; return; }
    contains "$output" freeflow0 "the device" || return
    contains "$output" "inet 10.50.0." "its address" || return
    [[ $output != *default* ]] || fail "it has a way out: $output" || return
    equal "$(vnic_count)" 0 "vNICs after its end" || return
    freeflow delete network red >/dev/null || return
    contains "$(device=red podman_run --rootfs /:O true 2>&1)" "unresolvable" "the reason"
}

# Labels of the vNICs that containers have.
container_labels() { freeflow status -o json | tr -d ' \n' | grep -o '"labels":\[[^{}]*\]\],' | grep -F '"engine","oci"'; }

# Starts a container that runs until it is ended, and waits until its program runs. Sets `started`, a process of ours.
start_sleeper() {
    local pid
    podman_run --cidfile "$work/cid" "$@" sleep 600 >"$work/output" 2>&1 &
    started=$!
    for _ in $(seq 300); do
        pid=$(freeflow ps -o json | awk '$1 == "\"pid\":" { gsub(/,/, "", $2); print $2; exit }')
        [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = sleep ] && return
        kill -0 "$started" 2>/dev/null || break
        sleep 0.1
    done
    fail "it does not run: $(cat "$work/output")"
}

end_sleeper() {
    timeout 60 podman --root "$work/storage" --runroot "$work/runroot" --runtime runc --events-backend none \
        rm --force --time 0 "$(cat "$work/cid")" >/dev/null 2>&1
    wait "$started"
    rm -f "$work/cid"
}

# An OCI image by hand, whose author has put annotations, an environment and labels of ours into it.
make_oci_image() {
    make_image
    python3 - "$image" "$work/oci" <<'END'
import hashlib, io, json, pathlib, sys, tarfile
root, oci = sys.argv[1], pathlib.Path(sys.argv[2])
(oci / "blobs/sha256").mkdir(parents=True, exist_ok=True)
def blob(data, kind, **more):
    digest = hashlib.sha256(data).hexdigest()
    (oci / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data), **more}
ours = {"freeflow.io/label.tier": "admin", "freeflow.io/label.forged": "yes", "freeflow.io/network": "red",
        "freeflow.io/name": "boss", "freeflow.io/vnic": "boss", "freeflow.io/ip": "10.50.0.99"}
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar:
    tar.add(root, arcname=".")
layer = layer.getvalue()
config = {"architecture": "amd64", "os": "linux", "rootfs": {
    "type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}, "config": {
    "Labels": ours, "Env": ["PATH=/bin", "FREEFLOW_LABEL=tier=admin", "FREEFLOW_NETWORK=red", "FREEFLOW_VNIC=boss"]}}
manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "annotations": ours,
            "config": blob(json.dumps(config).encode(), "config.v1+json"), "layers": [blob(layer, "layer.v1.tar")]}
index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
(oci / "index.json").write_text(json.dumps(index))
(oci / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
END
}

an_image_chooses_nothing() {
    make_oci_image
    local id labels
    # By a relative path: podman makes its name of it, which is in small letters.
    id=$(cd "$work" && podman --root "$work/storage" --runroot "$work/runroot" --events-backend none pull --quiet oci:oci) ||
        return
    start_sleeper --annotation freeflow.io/label.asked=yes "$id" || { end_sleeper; return 1; }
    # The engine has copied them: else this shows nothing.
    grep -rqsF freeflow.io/label.forged "$work/storage"/*-containers/*/userdata/config.json ||
        fail "podman did not copy the image's annotations" || { end_sleeper; return 1; }
    labels=$(container_labels)
    freeflow ps >"$work/ps"
    end_sleeper
    [ -n "$labels" ] || fail "no labels are shown" || return
    [[ $labels != *tier* && $labels != *forged* && $labels != *asked* ]] || fail "the image chose: $labels" || return
    ! grep -qE 'boss|10\.50\.0\.99' "$work/ps" || fail "the image chose: $(cat "$work/ps")" || return
    equal "$(vnic_count)" 0 "vNICs after its end"
}

a_declared_vnic() {
    printf '{"apiVersion": "freeflow.io/v1", "kind": "Vnic", "metadata": {"name": "database", "labels": {"tier": "server"}}, "spec": {"network": "default"}}' |
        freeflow apply -f - >/dev/null || return
    local address output
    address=$(freeflow get vnic database -o json | grep -o '10\.[0-9]*\.[0-9]*\.[0-9]*' | head -n 1)
    # Its labels and address, once at a time; and again when it is free.
    for _ in 1 2; do
        kind=vnic device=database start_sleeper --rootfs /:O || { end_sleeper; return 1; }
        freeflow ps >"$work/ps"
        freeflow get vnic database -o json >"$work/vnic"
        kind=vnic device=database podman_run --rootfs /:O true >"$work/second" 2>&1
        freeflow run --vnic database --rm -- true >"$work/third" 2>&1
        # A refused one takes nothing away.
        freeflow ps >"$work/ps2"
        end_sleeper
        contains "$(cat "$work/ps")" "$address" "its address" || return
        contains "$(cat "$work/ps2")" "$address" "after one that was refused" || return
        contains "$(cat "$work/vnic")" '"tier": "server"' "its labels" || return
        contains "$(cat "$work/second")" "in use by the container" "the reason" || return
        contains "$(cat "$work/third")" "in use by the container" "the reason" || return
        equal "$(freeflow ps -o json)" "[]" "containers after its end" || return
    done
    output=$(freeflow run --vnic database --rm -- ip -4 -o address 2>&1)
    contains "$output" "$address" "its address, in another container" || return
    # A container that was killed leaves it free.
    kind=vnic device=database start_sleeper --rootfs /:O || { end_sleeper; return 1; }
    kill -9 "$(freeflow ps -o json | awk '$1 == "\"pid\":" { gsub(/,/, "", $2); print $2; exit }')"
    wait "$started"
    rm -f "$work/cid"
    freeflow run --vnic database --rm -- true >"$work/output" 2>&1 || fail "$(cat "$work/output")" || return
    freeflow delete vnic database >/dev/null || return
    contains "$(kind=vnic device=database podman_run --rootfs /:O true 2>&1)" "unresolvable" "the reason" || return
    [ ! -e "$work/cdi/freeflow-vnics.json" ] || fail "a CDI file without devices is left"
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

tests=(unprivileged_in_own_root host_socket_is_out_of_reach image_without_library hostile_links host_folders_stay_as_they_are
    musl_is_refused
    hook_has_a_clean_environment host_network_gets_no_interface another_network
    an_image_chooses_nothing a_declared_vnic router_away killed_container_is_settled)
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
