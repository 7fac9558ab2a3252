"""Starting ranks, and reporting how they ended."""
