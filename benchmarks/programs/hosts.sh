# Run a line of shell on hosts node0, node1, ... (10.9.9.1, 10.9.9.2, ...), network namespaces at one switch; HOST is
# the number of the host. Whatever is made here ends with the processes in it.
# Usage: unshare --net --uts --mount --pid --fork --kill-child --mount-proc sh hosts.sh NUMBER FOLDER SHELL
set -e
if [ "$1" = host ]; then
    until ip link set eth0 up 2>/dev/null; do sleep 0.02; done
    ip addr add "10.9.9.$(($2 + 1))/24" dev eth0
    ip link set lo up
    hostname "node$2"
    HOST=$2 exec sh -c "$3"
fi
number=$1 folder=$2 shell=$3
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
ip link set lo up
ip link add br0 type bridge forward_delay 0
ip link set br0 up
pids=
for host in $(seq 0 $((number - 1))); do
    unshare --net --uts sh "$0" host "$host" "$shell" &
    pid=$!
    while [ "$(readlink "/proc/$pid/ns/net")" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add "port$host" type veth peer name eth0 netns "$pid"
    ip link set "port$host" master br0 up
    pids="$pids $pid"
done
wait $pids
