"""A load test by Locust, which runs in an environment of its own.

Imports only `loadtest.client` and `model.platform`.
"""
