"""The synchronous engine: scheduling, sampling and running a batch.

Knows no asyncio, HTTP or Prometheus, and imports only the files of `model` that need no PyTorch.
"""
