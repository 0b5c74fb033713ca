"""Settings from vLLM's own `--additional-config '{"draftsmith": {...}}'`, which reaches every
process of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
    share: float = 1.0  # of new requests that are recorded
    poll_s: float = 5.0  # between two looks into `versions`
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
    given = additional[SECTION]
    sentence = wrong(given)
    if sentence:
        once(f"{sentence}; the engine serves without draftsmith")
        return None
    return Settings(**given)


def wrong(given: Any, where: str = f"additional_config {SECTION!r}") -> str:
    """Sentence about the first setting that is unknown or has a wrong type; "" for none."""
    if not isinstance(given, Mapping):
        return f"{where} is {given!r} and must be an object of settings"
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, value in given.items():
        if name not in defaults:
            return f"{where} has no setting {name!r}; it has {sorted(defaults)}"
        if not _fits(value, defaults[name]):
            return f"{where} has {name}={value!r}; give a value like {defaults[name]!r}"
    if not 0 <= given.get("share", 1.0) <= 1:
        return f"{where} has share={given['share']!r}; give a number from 0 to 1"
    if given.get("poll_s", 1.0) <= 0:
        return f"{where} has poll_s={given['poll_s']!r}; give seconds above 0"
    return ""


def _fits(value: Any, default: Any) -> bool:
    """True where `value` has the type of `default`; an int is a float, a bool is only a bool."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


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
