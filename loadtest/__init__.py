"""Benchmarks and load tests of the engine and of running servers.

Imports `model`, `export` and `server.engine` to build what it measures.
"""
