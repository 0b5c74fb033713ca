"""Settings from vLLM's own `--additional-config '{"draftsmith": {...}}'`, which reaches every
process of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.config import SECONDS, SHARE, convert, option
from draftsmith.errors import UserError
from draftsmith.fleet.engine import once

SECTION = "draftsmith"


@dataclass(frozen=True)
class Settings:
    buffer: str = ""  # folder or fsspec URL of records; "" records nothing
    versions: str = ""  # versions folder or URL to follow; "" follows nothing
    engine: str = ""  # name in records and status files; "" is host name and port
    target: str = ""  # name of the target in records; "" is the model that vLLM was given
    target_revision: str = ""
    version: str = ""  # of the draft that serves at the start; "" where none is known
    share: float = option(1.0, "of new requests that are recorded", limits=SHARE)
    poll_s: float = option(5.0, "between two looks into `versions`", limits=SECONDS)
    spread_s: float = 0.0  # in which all engines begin to download a new version
    cache: str = ""  # local folder of fetched versions; "" is one below the user's cache
    admin: bool = False  # routes that swap drafts and drop cached prefixes, for this machine alone
    floor_drop: float = 0.1  # loss of alpha by which a version is given up without the learner
    floor_rounds: int = 2000  # of each of the two versions that are compared
    mend_expand_kernel: bool = False  # register a right `expand_kernel` on CPUs


def settings_of(vllm_config: Any) -> Settings | None:
    """Settings of an engine; None where it has none or wrong ones, which are logged once and leave
    the engine as it is."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or SECTION not in additional:
        return None
    try:
        return convert(additional[SECTION], Settings, SECTION)
    except UserError as error:
        once(f"additional_config: {error}; the engine serves without draftsmith")
        return None


@dataclass
class WorkerState:
    """State of the plugin in one worker: `worker.draftsmith`. A swap sets `version`, which the
    recorder reads once per round."""

    settings: Settings
    version: str = ""  # of the served draft, as records name it
    recorder: Any = None
    swaps: Any = None  # `fleet.swaps.swap.Swaps`, made at the first step of a swap
    # reasons by versions that are not served
    refused: dict[str, str] = field(default_factory=dict)
