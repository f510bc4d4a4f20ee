"""The error of everything that reads published models."""


class UnsupportedError(ValueError):
    """A published model that cannot be read; one line with the file, key or tensor, and the fix."""
