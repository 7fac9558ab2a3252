# Run a command on one of the hosts of two_hosts.sh with an /etc/hosts of its own, FOLDER/hosts-HOST.
# Usage: unshare --mount sh own_names.sh FOLDER COMMAND...
set -e
mount --bind "$1/hosts-$HOST" /etc/hosts
shift
exec "$@"
