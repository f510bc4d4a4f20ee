"""HTTP routes, one file or folder for each protocol.

Imports every other room of the server but `server.process`.
"""
