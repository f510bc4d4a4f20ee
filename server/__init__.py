"""The service: HTTP in front, one engine thread behind. Imports no PyTorch."""
