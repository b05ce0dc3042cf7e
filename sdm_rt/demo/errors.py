"""The error that ends the demo with a message for its user."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot go on; the message says why and what helps, and is all its user sees."""
