"""The process: the application, its connections, signals and shutdown.

Imports every other room of the server.
"""
