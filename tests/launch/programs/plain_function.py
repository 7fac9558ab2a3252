"""Launches a function."""

from plain_script import train  # type: ignore[import-not-found]  # beside this script

import rankwise as rw

if __name__ == "__main__":
    rw.launch(train, nproc=2)
