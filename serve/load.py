"""Loading of what is served, over HTTP and in Python: the target, the draft that the options name,
and the engine of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal, NamedTuple

import torch

from draftsmith.drafters.checkpoint import load, load_draft, trained_k
from draftsmith.drafters.config import named_folders
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.device import DTYPES, load_target
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.answers import AnswerTable, read_answers
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.drafters.versions import folder_of, open_live, versions
from draftsmith.errors import UserError
from draftsmith.record import Sink
from draftsmith.serve.config import DEFAULT_K, ServeConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore

log = logging.getLogger(__name__)
MakeSink = Callable[[ServeConfig, Target], Sink]


class LoadedEngine(NamedTuple):
    engine: EngineCore
    draft: LoadedDraft
    sink: Sink | None  # of its records; to be closed after it


def load_served_target(config: ServeConfig) -> Target:
    return load_target(
        config.target,
        dtype=config.dtype,
        device=config.device,
        max_length=config.max_length,
        trust_remote_code=config.trust_remote_code,
    )


def load_engine(
    config: ServeConfig,
    target: Target,
    make_sink: MakeSink | None = None,
    drafter: ServingDrafter | None = None,
) -> LoadedEngine:
    """The engine that the options name, not warmed up. `make_sink` is called when they ask to
    learn; `drafter` takes the place of their draft."""
    adapters = Adapters.load(target, named_folders(config.lora)) if config.lora else None
    draft = load_drafter(config, target, drafter)
    learns = config.learn is not None
    sink = make_sink(config, target) if learns and make_sink is not None else None
    with ExitStack() as unless_built:
        if sink is not None:
            unless_built.callback(sink.close)
        engine = build_engine(
            target,
            draft.drafter,
            config.engine_config(draft.k),
            sink=sink,
            draft_version=draft.version,
            adapters=adapters,
        )
        unless_built.pop_all()
    return LoadedEngine(engine, draft, sink)


class LoadedDraft(NamedTuple):
    drafter: ServingDrafter | None
    version: str  # "" without a drafter, "0" for one that no version names
    number: int | None  # in the versions folder; None for a draft from elsewhere
    refused: str = ""  # why the live version of that folder is not the one
    k: int | Literal["auto"] = DEFAULT_K  # where none is given: as many as it was trained for


def load_drafter(
    config: ServeConfig, target: Target, drafter: ServingDrafter | None = None
) -> LoadedDraft:
    """Load the trained draft, suffix decoding beside it or alone, or nothing. `drafter` takes the
    place of the trained draft."""
    own = None if drafter is None else LoadedDraft(drafter, "0", None)
    loaded = own or load_trained(config, target)
    if not config.suffix:
        return loaded
    stored = config.suffix_answers and AnswerTable(read_answers(config.suffix_answers, target))
    text = Suffix(max_cached_requests=config.suffix_max_cached_requests, answers=stored or None)
    if loaded.drafter is None:
        return LoadedDraft(text, "0", None, k="auto")
    return loaded._replace(drafter=TextFirst(loaded.drafter, text))


def load_trained(config: ServeConfig, target: Target) -> LoadedDraft:
    """Load the live version of the versions folder, or an earlier one where that is damaged, else
    the draft."""
    versions, refused = config.versions, ""
    if versions is not None:
        try:
            found = load_version(versions, target, dtype=DTYPES.get(config.draft_dtype))
        except UserError as error:
            if config.draft is None:
                raise
            found, refused = None, str(error)
            log.warning("%s; starting with draft %r", error, config.draft)
        if found is not None:
            return found
    draft = load_draft(config, target)
    if draft is not None and config.draft is not None:
        k = trained_k(config.draft, revision=config.draft_revision) or DEFAULT_K
        return LoadedDraft(draft, "0", None, refused, k)
    if versions is not None:
        raise UserError(
            f"versions folder {versions!r} has no version yet; give the draft to start with"
        )
    return LoadedDraft(None, "", None)


def load_version(root: str, target: Target, *, dtype: torch.dtype | None) -> LoadedDraft | None:
    opened = open_live(root, partial(load, target=target, dtype=dtype))
    if opened is None:
        return None
    refused = "" if opened.damage is None else str(opened.damage)
    if refused:
        log.warning("%s; starting with version %d", refused, opened.version)
    k = DEFAULT_K
    with suppress(UserError):
        # The starting draft's record: later versions have that of their learning.
        k = trained_k(folder_of(root, min(versions(root)))) or k
    return LoadedDraft(opened.draft, str(opened.version), opened.version, refused, k)
