"""The error of everything that reads published models."""


class UnsupportedError(ValueError):
    """A checkpoint that cannot be imported; one line with the file, key or tensor, and the fix."""
