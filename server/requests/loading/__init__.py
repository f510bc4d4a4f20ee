"""Models of a folder, which come and go while the server runs.

Part of `server.requests`, and imports what that may.
"""
