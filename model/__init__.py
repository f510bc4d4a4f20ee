"""Configuration, tokenizer and file formats of a model, and its PyTorch side.

Imports nothing else of the project; the files that the server imports are free of PyTorch.
"""
