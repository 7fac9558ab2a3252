"""The control plane: ranks agree on a call, and exchange short messages."""
