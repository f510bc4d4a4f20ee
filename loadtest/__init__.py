"""Benchmarks of the engine and of the service."""
