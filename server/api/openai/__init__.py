"""OpenAI's protocol: completions and chat completions.

Imports what `server.api` may import.
"""
