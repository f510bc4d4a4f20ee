"""Third-party clients, called as their users call them.

Each file uses one, and counts its calls.
"""
