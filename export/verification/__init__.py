"""An exported graph compared with PyTorch, a layer at a time; and which matrices keep 8 bits.

`paged_session` alone imports `server.engine`, to run a graph as a GPU serves it.
"""
