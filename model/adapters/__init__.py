"""Low-rank adapters (LoRA): where they fit in a model of ours, and peft's folders.

Imports `model.platform` and `model.records`, and no PyTorch.
"""
