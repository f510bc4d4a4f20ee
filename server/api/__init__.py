"""HTTP: the routes of each protocol, and everything around a request.

Imports every other room of the server except `server.process`.
"""
