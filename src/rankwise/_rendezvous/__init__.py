"""How ranks find each other, before there is a process group."""
