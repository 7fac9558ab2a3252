# Run a command on a host whose name server never answers: in new namespaces of network and mounts.
# Usage: unshare --net --mount sh silent_name_server.sh FOLDER COMMAND...
set -e
ip link set lo up
# A lookup takes 12 s: longer than a store may take to answer for other reasons.
printf 'nameserver 127.0.0.1\noptions timeout:6 attempts:2\n' > "$1/resolv.conf"
mount --bind "$1/resolv.conf" "$(readlink -f /etc/resolv.conf)"
shift
exec "$@"
