"""Interfaces for other packages that build on rankwise."""
