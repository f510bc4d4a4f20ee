"""Explanations of one text, outside the engine: attention, next tokens, and heads switched off."""
