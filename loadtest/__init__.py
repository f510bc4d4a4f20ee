"""Benchmarks of the engine, and benchmarks and load tests of running servers.

Imports `model`, `export` and `server.engine`, to build what it measures, and
`server.process.local_server`.
"""
