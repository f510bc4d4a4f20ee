"""The inference engine: synchronous, one thread, no knowledge of asyncio, HTTP or Prometheus."""
