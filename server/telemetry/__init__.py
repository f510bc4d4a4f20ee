"""Metrics, logs and start-up times.

Imports `server.engine`, `model.platform` and errors.
"""
