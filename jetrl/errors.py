"""The error that the CLI shows to a user as one message, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can mend. The message says what is wrong, with the values, and what to do about it."""
