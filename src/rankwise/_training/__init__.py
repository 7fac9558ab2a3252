"""Functions of a training loop, made of collectives."""
