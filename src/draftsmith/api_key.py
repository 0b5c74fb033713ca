"""API key of a server: an option, else of the environment, which no list of processes shows.
Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "DRAFTSMITH_API_KEY"
API_KEY_HELP = f"bearer token of that server [default: {VARIABLE} of the environment]"


def known_key(api_key: str | None) -> str | None:
    """The key that is given, else that of the environment; None without both."""
    return api_key or os.environ.get(VARIABLE) or None


def bearer(api_key: str | None) -> dict[str, str]:
    """Header of a request with the key; {} without one."""
    key = known_key(api_key)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def accepted_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """Keys that open a server; () for one that is open to all."""
    key = known_key(None)
    return tuple(given or ([] if key is None else [key]))


def with_key(api_key: str | None) -> dict[str, str]:
    """Environment of a child process that is to have the key."""
    return dict(os.environ) if api_key is None else os.environ | {VARIABLE: api_key}
