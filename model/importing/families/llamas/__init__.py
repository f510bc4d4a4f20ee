"""Published decoders whose tensors have Llama's names, but for those that they add or move."""
