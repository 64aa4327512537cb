"""The version, without the package around it."""

__version__ = "0.1.0"
