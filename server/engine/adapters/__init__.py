"""Low-rank adapters in memory, as the graph's operators read them.

Imports `model.adapters` and `kernels`, and nothing else of the engine.
"""
