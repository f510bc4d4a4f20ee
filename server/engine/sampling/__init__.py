"""From logits to tokens: sampling, the likeliest of all rows, beams, and drafts.

Imports `server.engine`.
"""
