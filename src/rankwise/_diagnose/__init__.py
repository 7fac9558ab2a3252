"""Diagnosis of a running job: its processes, the stacks of its ranks, and which rank the others wait for."""
