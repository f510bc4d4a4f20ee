"""Adapters of a served model by name, each served as a model of its own.

Part of `server.requests`, and imports what that may.
"""
