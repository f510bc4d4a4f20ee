"""Clients that nobody here wrote, as their users call them; each file uses one, and counts its calls."""
