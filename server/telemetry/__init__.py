"""Metrics, logs, traces and start-up times.

Imports `server.engine` and errors.
"""
