"""Operators of our own for the CPU: a graph is rewritten to use them when it is opened.

Imports nothing else of the project.
"""
