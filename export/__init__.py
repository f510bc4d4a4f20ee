"""Checkpoints turned into verified model directories: tracing, quantisation, verification.

Imports `model`; to verify on a GPU also `server.engine`.
"""
