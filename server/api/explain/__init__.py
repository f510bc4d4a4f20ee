"""The route of explanations."""
