"""Data behind the dashboard page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from draftsmith.serve.dashboard.learning import Learning
from draftsmith.serve.dashboard.live_text import TextView
from draftsmith.serve.dashboard.samples import History


@dataclass
class Dashboard:
    """What a server keeps to be looked at."""

    history: History
    learning: Learning = field(default_factory=Learning)
    text: TextView | None = None
    started_s: float = field(default_factory=time.time)
