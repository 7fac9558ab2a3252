# Run a command on a host whose own name is not loopback's: far is 10.9.9.9, on an interface of a namespace of its own.
# Usage: unshare --net --uts --mount sh far_host.sh HOSTS_FILE COMMAND...
set -e
ip link set lo up
ip link add far0 type veth peer name far1
ip addr add 10.9.9.9/24 dev far0
ip link set far0 up
ip link set far1 up
hostname far
mount --bind "$1" /etc/hosts
shift
exec "$@"
