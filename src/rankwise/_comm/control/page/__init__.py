"""The page of a host: memory through which its ranks agree. Where everything is in it: `layout`."""
