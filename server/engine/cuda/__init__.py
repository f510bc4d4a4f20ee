"""The model on CUDA: CUDA's runtime library, sessions, and the runner over blocks.

Imports `server.engine` and `server.engine.kv`.
"""
