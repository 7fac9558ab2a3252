"""Drop-in modules with the names and the behaviour of other libraries."""
