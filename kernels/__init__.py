"""Operators of our own, in C++, which the stock ONNX Runtime loads, and the graphs that use them.

README.md tells how they work. Imports `model.onnx`; free of PyTorch.
"""
