"""The subcommands of `kvasir`, one file each.

Imports every room, most of them only when a command runs.
"""
