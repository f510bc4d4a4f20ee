"""Everything between a protocol and the engine: typed requests, admission, deadlines, streams.

Imports `server.engine`, `server.state`, `server.text`, `server.telemetry`, settings and errors.
"""
