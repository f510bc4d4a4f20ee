"""Grammars that a text must follow, and masks of the tokens that they allow.

Imports `model.platform`.
"""
