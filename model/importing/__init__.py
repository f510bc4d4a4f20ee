"""Published Hugging Face checkpoints, turned into checkpoint directories.

Imports the files of `model`, and neither `model.network` nor `model.training`.
"""
