"""Ollama's API, over the same chats, texts and vectors that the other protocols use."""
