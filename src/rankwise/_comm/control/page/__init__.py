"""The page of a host: memory through which its ranks agree, and data moves. Where everything is in it: `layout`."""
