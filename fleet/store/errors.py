"""Errors of a store, each one sentence with the offending value and the mend."""

from __future__ import annotations


class StoreError(Exception):
    """A version, status or file of the store that is refused: another try reads the same."""


class StoreUnreachable(StoreError):
    """A store that does not answer: a later try may succeed, so that what is served stays."""
