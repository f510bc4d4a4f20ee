"""Hugging Face folders: the weights, the tokenizer, the chat template."""
