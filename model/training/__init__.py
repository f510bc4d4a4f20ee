"""Corpora, chats and the training loop, in one process or many.

Imports the files of `model` and `model.network`.
"""
