"""What runs the ranks of a launch on hosts that it has chosen itself."""
