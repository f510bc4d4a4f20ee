"""Models from stores: Hugging Face's hub, OCI registries and S3; only what serving needs of them.

Checkpoints on this machine are told by their content, as revisions are in stores.

Imports nothing of ours but files, the model directory's names and progress; no PyTorch.
"""
