"""The process that ranks are forked from."""
