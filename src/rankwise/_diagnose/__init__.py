"""What a running job does, seen from outside: its processes, stacks and verdict, without torch."""
