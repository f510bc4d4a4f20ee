"""HTTP routes, one file per protocol."""
