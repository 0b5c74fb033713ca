"""Python functions that a decoding round calls: as many on a loaded machine as on a quiet one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams


def calls(engine: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> int:
    """Calls of a round in which all prompts decode."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while any(request.num_output < 2 for request in requests):
        engine.step()
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    for request in requests:
        engine.cancel(request)
    return count
