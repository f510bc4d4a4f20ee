"""Anthropic's Messages API, over the same chat that OpenAI's routes use."""
