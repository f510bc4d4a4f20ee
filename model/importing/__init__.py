"""The import of published Hugging Face checkpoints as checkpoint directories.

It may import the files of `model` and `model.network`, but not `model.training`.
"""
