"""Decoders with an encoder, on ONNX Runtime.

Imports `server.engine`.
"""
