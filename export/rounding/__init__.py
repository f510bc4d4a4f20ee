"""A graph's weights: as they are stored, in int8 and int4, and its KV cache in int8.

Imports `model` and `export.rewrite`.
"""
