#!/bin/sh
# Installs FreeFlow from the directory that this file lies in, or removes what it has installed.
#
#   ./install.sh [--prefix DIR] [--no-systemd]      (default: /usr/local; again: an upgrade)
#   ./install.sh --uninstall [--prefix DIR]
#
# DESTDIR goes before each path, and leaves the running system alone.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
prefix=/usr/local
action=install
systemd=auto
root=${DESTDIR:-}
umask 022

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --prefix)
            [ $# -ge 2 ] || usage
            prefix=$2
            shift
            ;;
        --prefix=*) prefix=${1#--prefix=} ;;
        --no-systemd) systemd=no ;;
        --uninstall) action=uninstall ;;
        *) usage ;;
    esac
    shift
done
case $prefix in
    *[!A-Za-z0-9/._+-]* | */../* | */..) fail "--prefix $prefix: letters, digits and /._+- only" ;;
    /*) prefix=${prefix%/} ;;
    *) fail "--prefix $prefix: an absolute path is needed" ;;
esac
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "this needs root, or DESTDIR"
list=$prefix/lib/freeflow/installed-files
unit_directory=/etc/systemd/system
# The runtime was put into Docker's settings, once.
mark=/var/lib/freeflow/docker-registered
is_booted_by_systemd() { [ -z "$root" ] && [ "$systemd" != no ] && [ -d /run/systemd/system ]; }

# A program that runs keeps its file.
put() {
    mkdir -p "$root$(dirname "$2")"
    cp -P "$1" "$root$2.new"
    [ -h "$1" ] || chmod "$3" "$root$2.new"
    mv -f "$root$2.new" "$root$2"
}

mode_of() {
    if [ -x "$1" ]; then echo 755; else echo 644; fi
}

files_here() {
    (cd "$here" && find bin lib share include '(' -type f -o -type l ')' | LC_ALL=C sort)
}

# What this version installs.
names() {
    files_here | sed "s|^|$prefix/|"
    [ "$systemd" = no ] || echo "$unit_directory/freeflow.service"
    echo "$list"
}

# Puts standard input into the list, whole or not at all.
list_files() {
    mkdir -p "$root$prefix/lib/freeflow"
    cat >"$root$list.new"
    chmod 644 "$root$list.new"
    mv -f "$root$list.new" "$root$list"
}

# Of an install that did not come to its end.
incomplete() {
    rm -f "$root$list.new"
    [ -z "$work" ] || rm -rf "$work"
    echo "install.sh: the installation in $prefix is incomplete: run this again, or with --uninstall" >&2
}

check() {
    [ "$(uname -m)" = x86_64 ] || fail "these programs are for x86_64, and this machine is $(uname -m)"
    for file in bin/freeflow lib/freeflow/freeflow-router lib/freeflow/libibverbs.so.1 lib/freeflow/librdmacm.so.1; do
        [ -f "$here/$file" ] || fail "$file is missing beside this file: unpack the whole archive"
    done
    [ -z "$root" ] || return 0
    release=$(uname -r)
    major=${release%%.*}
    minor=${release#*.}
    minor=${minor%%[!0-9]*}
    [ "$major" -gt 5 ] || { [ "$major" = 5 ] && [ "$minor" -ge 12 ]; } || fail "Linux 5.12 or newer is needed, and this is $release"
    found=
    for directory in $(echo "$PATH" | tr : ' ') /usr/sbin /sbin /usr/bin /bin; do
        [ ! -x "$directory/tc" ] || found=yes
    done
    [ -n "$found" ] || fail "the program tc is missing; install it, for example: apt-get install iproute2, or dnf install iproute-tc"
}

install_all() {
    check
    # Before anything else is there: what an install that fails has left can be uninstalled.
    work=
    trap incomplete EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    work=$(mktemp -d)
    names >"$work/names"
    [ ! -f "$root$list" ] || cat "$root$list" >"$work/former"
    cat "$work"/* | LC_ALL=C sort -u | list_files
    files_here >"$work/here"
    while read -r file; do
        put "$here/$file" "$prefix/$file" "$(mode_of "$here/$file")"
    done <"$work/here"
    if [ "$systemd" != no ]; then
        sed "s|/usr/bin/freeflow|$prefix/bin/freeflow|" "$here/systemd/freeflow.service" >"$work/unit"
        put "$work/unit" "$unit_directory/freeflow.service" 644
    fi
    # The operator's own stays.
    if [ ! -e "$root/etc/default/freeflow" ]; then
        mkdir -p "$root/etc/default"
        cp "$here/systemd/freeflow.default" "$root/etc/default/freeflow"
        chmod 644 "$root/etc/default/freeflow"
    fi
    # Files of an earlier version that this one lacks.
    if [ -f "$work/former" ]; then
        while read -r file; do
            code=0
            grep -qxF -- "$file" "$work/names" || code=$?
            [ "$code" != 1 ] || rm -f "$root$file"
        done <"$work/former"
    fi
    list_files <"$work/names"
    for group in freeflow-admin freeflow-viewer; do
        [ -n "$root" ] || grep -q "^$group:" /etc/group || groupadd --system "$group"
    done
    trap - EXIT
    rm -rf "$work"
    if [ -z "$root" ] && command -v dockerd >/dev/null && [ ! -e "$mark" ]; then
        mkdir -p -m 0700 /var/lib/freeflow
        # A file that is no JSON stays as it is, and says so.
        "$prefix/bin/freeflow" docker register --mark "$mark" || true
    fi
    if is_booted_by_systemd; then
        systemctl daemon-reload
        ! systemctl --quiet is-active freeflow.service || systemctl restart freeflow.service
        echo "FreeFlow is installed in $prefix. Next: systemctl enable --now freeflow"
    else
        echo "FreeFlow is installed in $prefix. Next: $prefix/bin/freeflow up"
    fi
}

uninstall_all() {
    [ -f "$root$list" ] || fail "there is no $list: nothing was installed in $prefix by this script"
    files=$(cat "$root$list")
    # Other installations' unit and hosts stay.
    if grep -qF "ExecStart=$prefix/bin/freeflow " "$root$unit_directory/freeflow.service" 2>/dev/null; then
        ! is_booted_by_systemd || systemctl --quiet disable --now freeflow.service 2>/dev/null || true
    else
        files=$(echo "$files" | grep -vxF "$unit_directory/freeflow.service")
    fi
    # Whoever started them, and in whatever run directory. Nothing could take them down later. An install that failed
    # may lack the programs.
    if [ -z "$root" ] && [ -d /run/freeflow-hosts ] && [ -x "$prefix/bin/freeflow" ] &&
        [ -x "$prefix/lib/freeflow/freeflow-router" ]; then
        "$prefix/bin/freeflow" down --all --force || fail "a host is up that can't be taken down; nothing was removed"
    fi
    if [ -z "$root" ] && [ -e "$mark" ] && [ -x "$prefix/bin/freeflow" ]; then
        "$prefix/bin/freeflow" docker unregister --mark "$mark" || true
    fi
    echo "$files" | while read -r file; do
        rm -f "$root$file" "$root$file.new"
    done
    # Other directories are everybody's.
    echo "$files" | while read -r file; do
        directory=$(dirname "$file")
        while [ "${directory#*freeflow}" != "$directory" ] && rmdir "$root$directory" 2>/dev/null; do
            directory=$(dirname "$directory")
        done
    done
    ! is_booted_by_systemd || systemctl daemon-reload
    echo "FreeFlow is removed from $prefix; state is left in /var/lib/freeflow, and /etc/default/freeflow."
}

if [ "$action" = install ]; then install_all; else uninstall_all; fi
