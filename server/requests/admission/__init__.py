"""The decision to accept, queue or refuse a request, and each caller's limits."""
