"""The model on CUDA: the runtime library, sessions and the runner over blocks.

Imports `server.engine` and `server.engine.kv`.
"""
