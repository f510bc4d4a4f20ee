"""The server: an engine, the requests around it, and HTTP on top.

Each room imports only those that docs/architecture.md draws below it, and none imports PyTorch.
"""
