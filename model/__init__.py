"""What is trained: the decoder, its data, its tokenizer, and the directories it travels in."""
