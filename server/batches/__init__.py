"""Batches: files of requests, answered beside the requests of clients, and kept on disk.

Imports settings, errors, telemetry and requests; what answers a line is given to it.
"""
