"""Engines of others that run ours: Ray. May import `server` and `model.platform`."""
