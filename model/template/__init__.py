"""Chat templates: their settings, their Jinja, and the process with limits that renders them.

Imports `model.platform` and `model.directory`; free of PyTorch.
"""
