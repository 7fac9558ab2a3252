#!/bin/sh
# Looks like ssh to a launcher, and runs a command on one of the two hosts of two_hosts.sh, without the caller's variables.
# Usage: sh rsh.sh [-options] left|right COMMAND...
while [ $# -gt 0 ]; do
    case $1 in -*) shift ;; *) break ;; esac
done
host=$1
shift
enter=""
[ "$host" = right ] && enter="nsenter --target $RIGHT --net --uts --"
exec env -i HOME="$HOME" PATH="$PATH" TMPDIR="$TMPDIR" $enter sh -c "$*"
