"""Engines of others that run ours: Ray, with Serve for requests and Data for files of them.

May import what serves, `server` and `model`; the packages of others are extras.
"""
