"""Checks and measurements of the engine on a GPU, by CUDA or WebGPU.

Imports what `loadtest` may.
"""
