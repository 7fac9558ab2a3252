"""The collectives that users call."""
