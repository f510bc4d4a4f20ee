"""Mixed traffic by Locust, which runs in an environment of its own.

Imports `loadtest.sse_client` and `loadtest.local_server` alone.
"""
