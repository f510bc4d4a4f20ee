"""Text around tokens: detokenizing, chat formats, reasoning, tool calls.

Imports `server.engine.grammar` and the chat template of `model`.
"""
