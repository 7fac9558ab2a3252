"""The parts of the pytest plugin."""
