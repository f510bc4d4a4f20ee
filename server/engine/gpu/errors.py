"""The error of both kinds of GPU."""


class NoDeviceError(ValueError):
    """The GPU that a model was exported for is missing on this machine or in this installation."""
