"""The network as graphs: traced, over rows on a CPU, over blocks on a GPU, over packed texts.

Imports `model`, `export.rounding` and `export.rewrite`.
"""
