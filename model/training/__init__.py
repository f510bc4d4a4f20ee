"""The training of a decoder on text or chats, in one process or several.

It may import the files of `model` and `model.network`.
"""
