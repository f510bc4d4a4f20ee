"""Adapters of served models by name, each served as a model of its own.

Part of `server.requests`, and imports what that may.
"""
