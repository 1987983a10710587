# Runs in the guest, as a service of its systemd: a package is installed, enabled, started, upgraded; the router dies.
# Each promise that is kept prints a line "kept: NAME"; test_systemd.py knows the names.
set -u
export LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive

kept() { echo "kept: $1"; }
broken() {
    echo "broken: $*"
    systemctl status --no-pager freeflow.service
    journalctl --no-pager -u freeflow -n 40
    tail -n 40 /run/freeflow/router.log
    exit 1
}
main_pid() { systemctl show --property MainPID --value freeflow.service; }
state() { systemctl show --property ActiveState --value freeflow.service; }
# Until a command succeeds; the guest is emulated, and slow.
until_it() {
    for _ in $(seq 600); do
        "$@" && return 0
        sleep 0.1
    done
    broken "$* never came"
}
is_active_with_another() { [ "$(state)" = active ] && [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ]; }
is_inactive() { [ "$(state)" = inactive ]; }
is_the_router() { [ "$(main_pid)" = "$(cat /run/freeflow/router.pid)" ] && [ "$(cat "/proc/$(main_pid)/comm")" = freeflow-router ]; }
has_a_device() { freeflow exec a -- test -e /sys/class/infiniband/freeflow0/node_guid; }

dpkg --install /root/first/*.deb || broken "the package can't be installed"
[ "$(systemctl is-enabled freeflow.service)" = disabled ] && [ "$(state)" = inactive ] || broken "installing starts something"
getent group freeflow-admin >/dev/null || broken "no group"
kept installed

systemctl enable --now freeflow || broken "it does not start"
[ "$(state)" = active ] && is_the_router || broken "the router is not the main process"
freeflow status >/dev/null || broken "no status"
grep -q freeflow.service "/proc/$(main_pid)/cgroup" || broken "the router has left the unit's cgroup"
kept enabled-and-started

freeflow run --name a -d -- sleep infinity || broken "no container"
has_a_device || broken "no device"
test -s /etc/cdi/freeflow.json || broken "no CDI file"
kept runs-containers

before=$(main_pid)
kill -9 "$before"
until_it is_active_with_another "$before"
is_the_router || broken "another main process"
[ "$(systemctl show --property NRestarts --value freeflow.service)" = 1 ] || broken "more than one restart"
freeflow ps | grep -q '^a ' && has_a_device || broken "the container is gone"
freeflow run --rm -- test -e /sys/class/infiniband/freeflow0 || broken "no new container"
kept up-again-after-a-crash

before=$(main_pid)
dpkg --install /root/second/*.deb || broken "the upgrade failed"
is_active_with_another "$before" && is_the_router || broken "the upgrade left the old router"
freeflow ps | grep -q '^a ' && has_a_device || broken "the upgrade took the container"
[ "$(systemctl is-enabled freeflow.service)" = enabled ] || broken "the upgrade disabled it"
kept upgraded

cat >/root/network.yaml <<END
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24]}
END
freeflow apply -f /root/network.yaml || broken "nothing can be declared"
before=$(main_pid)
systemctl restart freeflow || broken "it does not restart"
is_active_with_another "$before" && freeflow get networks | grep -q '^red ' || broken "what was declared is gone"
freeflow ps | grep -q '^a ' || broken "the restart took the container"
kept restarted

systemctl stop freeflow
is_inactive || broken "it is $(state)"
until_it sh -c '! pidof freeflow-router'
freeflow ps | grep -q '^a ' || broken "the stop took the container"
systemctl start freeflow || broken "it does not start again"
freeflow down --force || broken "it can't be taken down"
until_it is_inactive
kept stopped

systemctl start freeflow || broken "it does not start after down"
freeflow run --name b -d -- sleep infinity || broken "no container"
grep -h 'a system call was refused' /run/freeflow/router.log* && broken "the router's system calls"
journalctl --no-pager -u freeflow | grep -iE 'denied|not permitted|read-only' && broken "the unit forbids too much"
dpkg --remove freeflow || broken "it can't be removed"
[ "$(state)" = inactive ] && ! pidof freeflow-router && test -d /var/lib/freeflow || broken "removal"
kept removed
dpkg --purge freeflow || broken "it can't be purged"
! test -e /var/lib/freeflow && ! test -e /etc/systemd/system/multi-user.target.wants/freeflow.service || broken "purge"
kept purged
