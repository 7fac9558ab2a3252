# Run a command on two hosts, left (10.9.9.1) and right (10.9.9.2), joined by a cable, with HOST=0 and HOST=1.
# Usage: unshare --net --uts --mount --pid --fork --kill-child --mount-proc sh two_hosts.sh HOSTS RESOLV COMMAND...
# Whatever is made here ends with the processes in it.
set -e
if [ "$1" = right ]; then
    shift
    until ip link set right0 up 2>/dev/null; do sleep 0.02; done
    ip addr add 10.9.9.2/24 dev right0
    ip link set lo up
    hostname right
    HOST=1 exec "$@"
fi
mount --bind "$1" /etc/hosts
mount --bind "$2" /etc/resolv.conf
shift 2
unshare --net --uts sh "$0" right "$@" &
right=$!
while [ "$(readlink /proc/$right/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
exec 9<"/proc/$right/ns/net" # the cable goes with either end, so both stay until this one has ended
ip link set lo up
ip link add left0 type veth peer name right0
ip link set right0 netns $right
ip addr add 10.9.9.1/24 dev left0
ip link set left0 up
hostname left
export RIGHT=$right # for rsh.sh
status=0
HOST=0 "$@" || status=$?
wait $right || status=$?
exit $status
