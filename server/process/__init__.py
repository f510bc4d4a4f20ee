"""The process: the application, its connections, traces, signals and shutdown.

Imports every other room of the server.
"""
