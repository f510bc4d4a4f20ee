"""Faults of production, each injected many times, and probes of a served model under load.

Each file does one thing and counts what is lost. They import the product, `tests`, and `loadtest`.
"""
