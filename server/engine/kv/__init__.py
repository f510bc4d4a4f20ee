"""The KV cache: rows of virtual memory on CPU, blocks on CUDA.

Imports nothing else of the project.
"""
