"""An exported graph compared with PyTorch, a layer at a time.

`paged_session` alone imports `server.engine`, to run a graph as a GPU serves it.
"""
