"""kvferry: a computed prompt prefix as a fleet-wide asset."""

__version__ = "0.1.0"
