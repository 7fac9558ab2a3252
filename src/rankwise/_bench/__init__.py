"""`rankwise bench`: how long collectives take, ours and the backend's own, and which host or rank is slow.

`operations` has the collectives, `measuring` takes the times of one at one size, and `results` are its rows: as text,
in files, in a plot, and compared with those of another run. `pairs` finds slow hosts. Nothing but the command imports
this package.
"""
