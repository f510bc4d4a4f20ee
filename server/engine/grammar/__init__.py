"""Grammars that a text must follow, and masks of the tokens that they allow.

Imports nothing else of the project.
"""
