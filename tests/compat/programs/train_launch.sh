#!/bin/sh
# What detection projects hand to their launcher: a training command, with the arguments that follow.
set -e
exec "${PYTHON:-python}" -u "$(dirname "$0")/train_launch.py" --dataset tiny "$@"
