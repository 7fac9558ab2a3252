"""The variables of launchers, as facts with their sources: pure functions of a mapping, without torch."""
