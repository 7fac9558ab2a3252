"""Logs before, in and after a session."""

import logging
import sys

import rankwise as rw
from rankwise.logging import configure

log = logging.getLogger("train")
configure(folder=sys.argv[1])
log.info("before")
with rw.init():
    configure(folder=sys.argv[1])  # again, without double lines
    log.info("in")
    log.warning("careful")
    log.debug("nobody reads it")
    rw.barrier()
log.info("after")
