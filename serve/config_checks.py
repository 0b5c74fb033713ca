"""Checks of the options of `serve`: options that exclude each other, and options
that another one makes void. Torch-free."""

from __future__ import annotations

from draftsmith.config import check_limits
from draftsmith.drafters.config import check_draft_options, named_folders
from draftsmith.drafters.tree_shape import TreeShape, parse_tree
from draftsmith.errors import UserError
from draftsmith.serve.config import (
    EngineConfig,
    HttpOptions,
    LearningOptions,
    ServeConfig,
    ServedLookup,
)


def check_engine(config: EngineConfig) -> None:
    check_limits(config)
    if config.adaptive and config.k_schedule is not None:
        raise UserError(
            f"k is auto together with k_schedule {config.k_schedule!r}; choose one of them"
        )
    if config.tree is not None and config.least_confidence > 0:
        raise UserError(
            f"tree is given with least_confidence {config.least_confidence:g}, which ends chains; "
            "leave one of them out"
        )
    if config.synthetic_acceptance is None:
        return
    if not config.synthetic_acceptance:
        raise UserError("synthetic_acceptance is empty; give rates from 0 to 1, one per position")
    if config.verification != "chain":
        raise UserError(
            f"verification is {config.verification!r} together with synthetic_acceptance, which "
            "verifies no draft; leave one of them out"
        )


def configured_tree(config: EngineConfig) -> TreeShape | None:
    if config.tree is None:
        return None
    if config.verification != "chain":
        raise UserError(
            f"verification is {config.verification!r}, which judges chains, together with a tree; "
            "leave one of them out"
        )
    if config.synthetic_acceptance is not None:
        raise UserError(
            "synthetic_acceptance is given, which keeps drafts of a chain, together with a tree; "
            "leave one of them out"
        )
    return parse_tree(config.tree)


def check(config: ServeConfig) -> None:
    """Refuses what cannot be served, before anything is loaded."""
    check_serve(config)
    engine = config.engine_config()
    check_engine(engine)
    configured_tree(engine)


def check_serve(config: ServeConfig) -> None:
    check_limits(config)
    _check_address(config)
    _check_adapters(config)
    _check_drafts(config)
    _check_seed(config)
    _check_recorded_taps(config)
    _check_void(config)


def _check_address(http: HttpOptions) -> None:
    if http.api_key is not None and not all(key.strip() for key in http.api_key):
        # An unset variable in a command line would open the server to requests without a key.
        raise UserError(
            "api_key is empty; give a key, or leave it out for a server that asks for none"
        )


def _check_adapters(config: ServeConfig) -> None:
    names, own = named_folders(config.lora or ()), config.name or config.target
    if own in names:
        raise UserError(
            f"lora names {own!r}, which is the target's own name in the API; choose another"
        )
    if names and config.tensor_parallel > 1:
        raise UserError(
            f"lora is given with tensor_parallel {config.tensor_parallel}, whose layers are "
            "sharded; merge the adapter into the target, or serve on one device"
        )
    if names and config.dtype == "int8":
        raise UserError(
            "lora is given with dtype int8, to whose layers no adapter is added; name the "
            "adapter's folder as the target, which merges it first, or give another dtype"
        )


def _check_drafts(config: ServeConfig) -> None:
    trained = config.draft is not None or config.versions is not None
    if config.ngram and (config.suffix or trained):
        raise UserError(
            f"ngram is given together with {'suffix' if config.suffix else 'a trained draft'}; "
            "choose one of them"
        )
    check_draft_options(config, other_draft=config.versions is not None)
    if config.tree is not None and (config.suffix or not trained):
        beside = (
            "suffix, which copies chains"
            if config.suffix
            else "no trained draft, which alone grows one"
        )
        raise UserError(
            f"tree is given with {beside}; leave it out or draft with eagle3, eagle1, mtp or medusa"
        )
    if not trained and config.fallback != "none":
        raise UserError(
            "fallback is given without a trained draft; name the draft too or leave it out"
        )
    if config.heterogeneous_vocab and config.learns_by():
        raise UserError(
            "heterogeneous_vocab is given with versions or learn, which train a draft over the "
            "target's ids; choose one"
        )
    if config.suffix and config.learn is not None and trained:
        # The watch over a version compares its acceptance with what that draft predicts.
        raise UserError(
            "learn is given with suffix beside a draft, whose rounds it could not distinguish; "
            "leave suffix or learn out"
        )


def _check_seed(config: ServeConfig) -> None:
    """Refuse a seed beside learning: a draft must not learn from answers whose draws a restart
    makes again."""
    learning = config.learns_by()
    if config.seed is not None and learning:
        raise UserError(
            f"seed is {config.seed} together with {learning}, and a draft that learned from "
            "answers which a restart repeats would bias them; leave seed out"
        )


def _check_recorded_taps(learning: LearningOptions) -> None:
    """Refuse recorded states that no learner could train on, or that would show masked text."""
    if learning.record_taps == 0:
        return
    given = f"record_taps is {learning.record_taps}"
    if learning.learn is None:
        raise UserError(f"{given} without learn, which stores the records; give both or neither")
    if not learning.learn_distributions:
        raise UserError(
            f"{given} with no-learn-distributions, and states without distributions teach nothing; "
            "leave one of them out"
        )
    if learning.redact is not None:
        raise UserError(
            f"{given} with redact, and states cannot be masked as tokens are; leave one of them out"
        )


def _check_void(config: ServeConfig) -> None:
    """Refuse settings of a drafter that is not used, and a k where another option sets how much is
    drafted."""
    given, defaults = vars(config), vars(ServedLookup())
    for drafter, prefix in (("suffix", "suffix_"), ("ngram", "prompt_lookup_")):
        for name, default in defaults.items():
            value = given[name]
            if (
                name.startswith(prefix)
                and value != default
                and not given[drafter]
                and config.fallback != drafter
            ):
                raise UserError(
                    f"{name} is {value} but nothing drafts by {drafter}; give {drafter} "
                    "too or leave it out"
                )
    if config.suffix_share != defaults["suffix_share"] and not (
        config.suffix and (config.draft or config.versions)
    ):
        raise UserError(
            f"suffix_share is {config.suffix_share}, which is for suffix beside a draft; "
            "give both or leave it out"
        )
    for name, value in (("k_schedule", config.k_schedule), ("tree", config.tree)):
        if config.k not in (None, "auto") and value is not None:
            raise UserError(
                f"k is {config.k} together with {name} {value!r}, which sets how much is "
                "drafted; leave k out"
            )
