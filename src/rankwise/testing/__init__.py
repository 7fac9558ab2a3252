"""The pytest plugin, and fakes for tests without processes."""
