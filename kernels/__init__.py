"""Operators of our own, in C++, which the stock ONNX Runtime loads; README.md tells how they work.

Imports `model.onnx`; free of PyTorch.
"""
