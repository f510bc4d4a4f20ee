"""Models of whole texts: an engine and a runner without a KV cache.

Imports `server.engine`.
"""
