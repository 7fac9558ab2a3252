"""The data planes: transports of tensors."""
