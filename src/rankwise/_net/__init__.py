"""Sockets, hosts and the secret of a job."""
