"""Models from stores: Hugging Face's hub, OCI registries and S3; only what serving needs of them.

Imports nothing of ours but files, the model directory's names and progress; no PyTorch.
"""
