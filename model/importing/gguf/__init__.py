"""GGUF files: the header, the types, llama.cpp's names of families and tokenizers."""
