"""Log of everything that runs inside another engine's processes: each sentence once."""

from __future__ import annotations

import logging

logger = logging.getLogger("draftsmith.fleet")
_logged: set[str] = set()


def once(sentence: str, level: int = logging.WARNING) -> None:
    """Log a sentence the first time in this process, and never again."""
    if sentence not in _logged:
        _logged.add(sentence)
        logger.log(level, "draftsmith: %s", sentence)
