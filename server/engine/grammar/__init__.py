"""Grammars that a text must follow, and the masks of tokens that they allow.

Imports nothing else of the server.
"""
