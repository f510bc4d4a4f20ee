"""The KV cache: rows of virtual memory on the CPU, blocks on CUDA, and their prefix caches.

Imports nothing else of the project.
"""
