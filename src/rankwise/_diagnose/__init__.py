"""What a running job does, seen from outside and without torch.

`processes` and `jobs` find the ranks of this host in /proc; `sampling`, `stack` and `py_spy` take their stacks;
`watching` says which rank the others wait for. `watcher` is the process that watches ranks and reports a hang: its
`findings`, those of `other_hosts`, torch's `flight_record`, and the text (`hang_report`).
"""
