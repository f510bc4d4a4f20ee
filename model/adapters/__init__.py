"""Low-rank adapters (LoRA): where they fit in an exported model, and peft's folders.

Imports `model.platform`, and no PyTorch.
"""
