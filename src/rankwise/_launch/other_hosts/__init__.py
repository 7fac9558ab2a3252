"""The other hosts of a launch: a watchdog on each, and what its launcher hears of them."""
