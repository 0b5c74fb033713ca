"""Loading of the served pair: the target, the draft that the options
name, and the fallback of a failed draft."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.drafters.adapters.adapters import Adapters
from draftsmith.drafters.adapters.names import named_folders
from draftsmith.drafters.checkpoint import load, load_draft
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.published.versions import latest, open_version
from draftsmith.drafters.target.device import DTYPES, device_of, weight_dtype
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.errors import UserError
from draftsmith.serve.config import ServeConfig


def load_target(config: ServeConfig) -> Target:
    device = device_of(config.device)
    return Target.load(
        config.target,
        dtype=weight_dtype(config.dtype, device),
        device=device,
        max_length=config.max_length,
        trust_remote_code=config.trust_remote_code,
    )


def load_adapters(config: ServeConfig, target: Target) -> Adapters | None:
    return Adapters.load(target, named_folders(config.lora)) if config.lora else None


class LoadedDraft(NamedTuple):
    drafter: ServingDrafter | None
    version: str  # "" without a drafter, "0" for one that no version names
    number: int | None  # in the versions folder; None for a draft from elsewhere


def load_drafter(config: ServeConfig, target: Target) -> LoadedDraft:
    """Load n-grams where `ngram` is given, else the trained draft, suffix decoding beside it or
    alone, or nothing."""
    if config.ngram:
        return LoadedDraft(
            Ngram(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max), "0", None
        )
    loaded = load_trained(config, target)
    if not config.suffix:
        return loaded
    text = Suffix(config.suffix_options())
    if loaded.drafter is None:
        return LoadedDraft(text, "0", None)
    return loaded._replace(drafter=TextFirst(loaded.drafter, text, share=config.suffix_share))


def load_fallback(config: ServeConfig) -> ServingDrafter | None:
    if config.fallback == "ngram":
        return Ngram(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
    return Suffix(config.suffix_options()) if config.fallback == "suffix" else None


def load_trained(config: ServeConfig, target: Target) -> LoadedDraft:
    """Load the live version of the versions folder, else the draft."""
    if config.versions is not None and (number := latest(config.versions)) is not None:
        folder, dtype = open_version(config.versions, number), DTYPES.get(config.draft_dtype)
        return LoadedDraft(load(folder, target, dtype=dtype), str(number), number)
    draft = load_draft(config, target)
    if draft is not None:
        return LoadedDraft(draft, "0", None)
    if config.versions is not None:
        raise UserError(
            f"versions folder {config.versions!r} has no version yet; give the draft to start with"
        )
    return LoadedDraft(None, "", None)
