"""ONNX Runtime's one import, and the files that a graph reads its weights from."""
