"""The model on a GPU: CUDA, WebGPU's plugin, and the runner over blocks that both share.

Imports `server.engine` and `server.engine.kv`.
"""
