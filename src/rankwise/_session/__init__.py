"""init, finalize and getters."""
