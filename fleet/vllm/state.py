"""State of the plugin in one worker: `worker.draftsmith`.

A swap sets `version`, the recorder reads it once per round. `refused` maps a version to the reason
for which it is not served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.fleet.vllm.settings import Settings


@dataclass
class WorkerState:
    settings: Settings
    version: str = ""  # of the served draft, as records name it
    recorder: Any = None
    swaps: Any = None  # `fleet.swaps.swap.Swaps`, made at the first step of a swap
    refused: dict[str, str] = field(default_factory=dict)
