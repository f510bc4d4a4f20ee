"""Published models, as Hugging Face folders or GGUF files, read as checkpoints.

It may import the files of `model` and `model.network`, but not `model.training`.
"""
