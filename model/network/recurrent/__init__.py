"""Recurrent sublayers: each kind is a module, and an entry of MIXERS in `network/block.py`.

Imports `model.configuration`, and of `model.network` what is told of a run.
"""
