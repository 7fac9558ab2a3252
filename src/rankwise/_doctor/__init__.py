"""`rankwise doctor`: whether the hosts and the ranks of a world are fit for a job.

`facts` collects what one rank sees of its host, `probes` what the hosts see of each other, and `checks` compares the
facts of all ranks, without any effect. Nothing but the command imports this package.
"""
