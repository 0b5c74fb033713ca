"""Options of `draftsmith top`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import SECONDS, option


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    url: str = option("http://127.0.0.1:8000", "a running draftsmith server")
    api_key: str | None = option(None, API_KEY_HELP)
    every_s: float = option(2.0, "seconds between two refreshes", limits=SECONDS)
