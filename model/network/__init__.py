"""The Transformer decoder as PyTorch modules, the only definition of the model.

Imports `model.config` alone.
"""
