"""From a checkpoint to a model directory: the ONNX graph, and the proof that it computes what PyTorch does."""
