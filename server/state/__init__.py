"""State that the replicas of a fleet share, or that a server alone keeps in its memory.

Tokens and requests of callers, stored responses, and who streams a response now. Imports errors
only.
"""
