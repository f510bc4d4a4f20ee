"""The Transformer as PyTorch modules, the only definition of the model.

Imports `model.config` and `model.configuration`.
"""
