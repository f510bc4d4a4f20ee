"""Metrics, logs and start-up times.

Imports `server.engine` and errors.
"""
