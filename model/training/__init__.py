"""The training of a decoder on text or chats, or of an encoder on text or pairs, by processes.

It may import the files of `model` and `model.network`.
"""
