#!/usr/bin/env bash
# Shows FreeFlow on this machine: unmodified RDMA programs from Debian's packages, each end in a container of its own, on
# a machine that needs no RDMA hardware. Installs and builds what is missing, brings a host up, runs the programs,
# shows where the bytes went, and takes everything down again, also when interrupted.
#
#   scripts/demo.sh [--no-build]
#
# FREEFLOW_DIST: where the programs are (default: dist). Every step has a limit of time.
set -uo pipefail
cd "$(dirname "$0")/.."

dist=${FREEFLOW_DIST:-$PWD/dist}
build=1
case ${1:-} in
    '') ;;
    --no-build) build=0 ;;
    *) echo "usage: scripts/demo.sh [--no-build]" >&2; exit 2 ;;
esac

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
give_up() { echo "demo: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || give_up "it installs packages and makes containers, so it needs root; use: sudo make demo"

work=$(mktemp -d /tmp/freeflow-demo.XXXXXX)
run_dir=/run/freeflow
brought_up=0 background=() podman_names=()

freeflow() { timeout --foreground --kill-after=5 60 "$dist/bin/freeflow" --run-dir "$run_dir" "$@"; }

clean_up() {
    trap - EXIT INT TERM HUP
    local name pid
    for name in "${podman_names[@]}"; do
        timeout 30 podman rm -f -t 1 "$name" >/dev/null 2>&1
    done
    for name in demo-server demo-client; do
        freeflow rm -f "$name" >/dev/null 2>&1
    done
    for pid in "${background[@]}"; do
        kill "$pid" 2>/dev/null
    done
    if [ $brought_up = 1 ]; then
        freeflow down --force >/dev/null 2>&1
    fi
    rm -rf "$work"
}
trap clean_up EXIT
trap 'clean_up; echo; echo "demo: interrupted; everything is taken down again" >&2; exit 130' INT
trap 'clean_up; exit 143' TERM HUP

# ---- what is needed

install() {
    local wanted=()
    command -v ip >/dev/null || wanted+=(iproute2)
    command -v ib_write_bw >/dev/null || wanted+=(perftest)
    command -v ibv_rc_pingpong >/dev/null || wanted+=(ibverbs-utils)
    if [ $build = 1 ]; then
        command -v cc >/dev/null || wanted+=(build-essential)
    fi
    [ ${#wanted[@]} -gt 0 ] || return 0
    say "Installing ${wanted[*]}"
    command -v apt-get >/dev/null || give_up "please install ${wanted[*]} (there is no apt-get here)"
    export DEBIAN_FRONTEND=noninteractive
    timeout --foreground 300 apt-get install -y --no-install-recommends "${wanted[@]}" >"$work/apt" 2>&1 && return
    timeout --foreground 300 apt-get update >>"$work/apt" 2>&1
    timeout --foreground 300 apt-get install -y --no-install-recommends "${wanted[@]}" >>"$work/apt" 2>&1 && return
    tail -5 "$work/apt" >&2
    give_up "apt-get install ${wanted[*]} failed"
}

install
if [ $build = 1 ]; then
    say "Building"
    timeout --foreground 1200 make --no-print-directory build || give_up "the build failed"
fi
[ -x "$dist/bin/freeflow" ] || give_up "$dist/bin/freeflow is not there; run make"

# ---- the host

up_options=()
if freeflow status >/dev/null 2>&1; then
    # Another host is up here: one of our own beside it, with its CDI file out of the other's way.
    run_dir=$work/run
    up_options=(--cdi-dir "$work/cdi")
fi
say "freeflow up"
brought_up=1
freeflow up "${up_options[@]}" || give_up "freeflow up failed"

# The value of a field: in the JSON of `ps`, of the container with this name or id; one field a line.
container_field() {
    freeflow ps -o json | awk -v wanted="$1" -v field="\"$2\":" '
        /^  \{/ { found = 0; value = "" }
        $1 == "\"name\":" || $1 == "\"id\":" { gsub(/[",]/, "", $2); if ($2 == wanted) found = 1 }
        $1 == field { value = $2; gsub(/[",]/, "", value) }
        /^  \}/ && found { print value; exit }'
}

# The router's own counters, which come before those of the vNICs.
counter() { freeflow status -o json | awk -v field="\"$1\":" '$1 == field { gsub(/,/, "", $2); print $2; exit }'; }
counters() { echo "$(counter messages) $(counter bytes) $(counter slow_path_bytes)"; }

# Waits until something in the container listens on the port, seen from outside.
await_port() {
    local pid row end=$((SECONDS + 30))
    row=$(printf ':%04X ' "$2")
    while [ $SECONDS -lt $end ]; do
        pid=$(container_field "$1" pid)
        if [ -n "$pid" ] && cat "/proc/$pid/net/tcp" "/proc/$pid/net/tcp6" 2>/dev/null | grep -F "$row" | grep -q ' 0A '; then
            return 0
        fi
        sleep 0.05
    done
    return 1
}

human() { awk -v n="$1" 'BEGIN { split("B kB MB GB TB", unit); i = 1; while (n >= 1000 && i < 5) { n /= 1000; i++ }
    printf(i == 1 ? "%d %s" : "%.1f %s", n, unit[i]) }'; }

show_bytes() {
    local before after
    read -ra before <<<"$1"
    read -ra after <<<"$2"
    echo "   $((after[0] - before[0])) messages with $(human $((after[1] - before[1]))) went from one container's" \
        "memory to the other's; through the slow path: $(human $((after[2] - before[2])))"
}

# ---- two `freeflow run` containers

# pair PORT COMMAND…: the command in a container as server, the same and the server's address in another as client
pair() {
    local port=$1 ip before code
    shift
    say "$* in two freeflow containers"
    echo "   freeflow run --name demo-server -- $*"
    freeflow run -d --rm --name demo-server -- "$@" >/dev/null || give_up "the server did not start"
    await_port demo-server "$port" || give_up "$1 does not listen on port $port"
    ip=$(container_field demo-server ip)
    before=$(counters)
    echo "   freeflow run --name demo-client -- $* $ip"
    freeflow run --rm --name demo-client -- "$@" "$ip"
    code=$?
    [ $code = 0 ] || give_up "$1 ended with exit code $code"
    freeflow stop -t 2 demo-server >/dev/null 2>&1
    show_bytes "$before" "$(counters)"
}

total_before=$(counters)
pair 18515 ib_write_bw
pair 18515 ib_send_lat
# -g 0: this program asks for no GID by itself, on any RoCE device.
pair 18515 ibv_rc_pingpong -g 0

# ---- two podman containers, unprivileged

podman_options=()
podman_run() {
    timeout --foreground --kill-after=5 90 podman "${podman_runtime[@]}" run --rm --network none --cap-drop all --user 1000 \
        "${podman_options[@]}" --device freeflow.io/net=default "$@"
}

# Finds options with which podman works here; the containers' root is this machine's own, under an overlay.
podman_works() {
    local limits=(--ulimit nofile=1024:1024 --ulimit nproc=1024:1024)
    podman_runtime=() podman_options=()
    podman_run --rootfs /:O true >"$work/podman" 2>&1 && return
    podman_options=("${limits[@]}")
    podman_run --rootfs /:O true >"$work/podman" 2>&1 && return
    podman_runtime=(--runtime runc)
    podman_run --rootfs /:O true >"$work/podman" 2>&1
}

podman_pair() {
    local id end=$((SECONDS + 60)) ip before
    say "$* in two podman containers: --cap-drop all --user 1000 --device freeflow.io/net=default"
    podman_names=("freeflow-demo-server-$$" "freeflow-demo-client-$$")
    podman_run --name "${podman_names[0]}" --cidfile "$work/cid" --rootfs /:O "$@" >"$work/server" 2>&1 &
    background+=($!)
    until [ -s "$work/cid" ]; do
        [ $SECONDS -lt $end ] || { cat "$work/server" >&2; give_up "podman did not start the server"; }
        sleep 0.1
    done
    id=$(cat "$work/cid")
    await_port "$id" 18515 || { cat "$work/server" >&2; give_up "$1 does not listen"; }
    ip=$(container_field "$id" ip)
    before=$(counters)
    podman_run --name "${podman_names[1]}" --rootfs /:O "$@" "$ip" || give_up "$1 failed under podman"
    wait "${background[-1]}"
    show_bytes "$before" "$(counters)"
}

if ! command -v podman >/dev/null; then
    say "podman is not installed, so no containers from images here (apt-get install podman)"
elif [ "$run_dir" != /run/freeflow ]; then
    say "another FreeFlow host is up here and has the podman device, so no podman containers"
elif podman_works; then
    podman_pair ib_write_bw
else
    say "podman is installed but can't run a container here: $(tail -1 "$work/podman")"
fi

# ---- where the bytes went

say "freeflow status"
freeflow status
echo
echo "All together:"
show_bytes "$total_before" "$(counters)"
cat <<END

Next, try:
  $dist/bin/freeflow up
  $dist/bin/freeflow run -d --name a -- ib_read_lat
  $dist/bin/freeflow run --rm -- ib_read_lat \$($dist/bin/freeflow ps | awk '\$1 == "a" { print \$2 }')
  $dist/bin/freeflow run --rm -it -- bash          # look around: ibv_devinfo -v, ip addr
  podman run --device freeflow.io/net=default IMAGE ibv_devinfo
  $dist/bin/freeflow doctor
END
