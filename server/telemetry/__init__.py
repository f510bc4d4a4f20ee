"""Metrics, logs and start-up times.

Imports `server.engine`, `model.machine` and errors.
"""
