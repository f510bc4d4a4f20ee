"""OpenAI's Responses: a chat whose input, output and stream consist of typed items.

Imports what `server.api` may import.
"""
