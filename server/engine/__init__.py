"""The synchronous inference engine: scheduling, running, sampling.

Knows no asyncio, HTTP or Prometheus; imports only the modules of `model` that need no PyTorch.
"""
