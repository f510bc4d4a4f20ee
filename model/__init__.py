"""Model configuration, tokenizer and file formats, and the PyTorch side of a model.

Imports nothing else of the project; files on this level that the server imports never import PyTorch.
"""
