"""Batches: files of requests, answered beside the requests of clients, and kept on disk.

Imports errors and state only; what answers a request is given to it.
"""
