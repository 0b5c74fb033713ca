"""Checks of the options of `serve`: options that exclude each other, and options
that another one makes void. Torch-free."""

from __future__ import annotations

from typing import Any

from draftsmith.config import check_limits
from draftsmith.drafters.config import check_draft_options, named_folders
from draftsmith.drafters.tree_shape import TreeShape, parse_tree
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig, ServeConfig

# Options that exclude each other where they are not their defaults, and why.
ENGINE_CLASHES = (
    ("tree", "least_confidence", "which ends chains"),
    ("tree", "verification", "which judges chains"),
)
FIXED_IDS = "which trains a draft over the target's ids"
REPEATED = "and a draft that learned from answers which a restart repeats would bias them"
CLASHES = (
    ("tree", "suffix", "which copies chains"),
    ("heterogeneous_vocab", "versions", FIXED_IDS),
    ("heterogeneous_vocab", "learn", FIXED_IDS),
    ("seed", "versions", REPEATED),
    ("seed", "learn", REPEATED),
    ("record_taps", "learn_distributions", "and states without distributions teach nothing"),
    ("record_taps", "redact", "and states cannot be masked as tokens are"),
)
# Options that one of others must be given with.
TRAINED = ("draft", "versions")
NEEDS = {
    "tree": TRAINED,
    "record_taps": ("learn",),
    "suffix_answers": ("suffix",),
    "suffix_max_cached_requests": ("suffix",),
}


def check_engine(config: EngineConfig) -> None:
    check_limits(config)
    _check_clashes(config, ENGINE_CLASHES)


def configured_tree(config: EngineConfig) -> TreeShape | None:
    return None if config.tree is None else parse_tree(config.tree)


def check(config: ServeConfig) -> None:
    """Refuses what cannot be served, before anything is loaded."""
    check_limits(config)
    if config.api_key is not None and not all(key.strip() for key in config.api_key):
        # An unset variable in a command line would open the server to requests without a key.
        raise UserError(
            "api_key is empty; give a key, or leave it out for a server that asks for none"
        )
    own = config.name or config.target
    if own in named_folders(config.lora or ()):
        raise UserError(
            f"lora names {own!r}, which is the target's own name in the API; choose another"
        )
    _check_clashes(config, CLASHES)
    for option, others in NEEDS.items():
        if _given(config, option) and not any(_given(config, other) for other in others):
            raise UserError(
                f"{_said(config, option)} is given without {' or '.join(others)}; give both or "
                "leave it out"
            )
    check_draft_options(config, other_draft=config.versions is not None)
    _check_beside(config)
    engine = config.engine_config()
    check_engine(engine)
    configured_tree(engine)


def _check_beside(config: ServeConfig) -> None:
    """Refuse what three options make void."""
    trained = any(_given(config, option) for option in TRAINED)
    if config.suffix and config.learn is not None and trained:
        # The watch over a version compares its acceptance with what that draft predicts.
        raise UserError(
            "learn is given with suffix beside a draft, whose rounds it could not distinguish; "
            "leave suffix or learn out"
        )
    if config.k not in (None, "auto") and config.tree is not None:
        raise UserError(
            f"k is {config.k} together with tree {config.tree!r}, which sets how much is drafted; "
            "leave k out"
        )


def _check_clashes(config: Any, clashes: tuple[tuple[str, str, str], ...]) -> None:
    for option, other, why in clashes:
        if _given(config, option) and _given(config, other):
            raise UserError(
                f"{_said(config, option)} is given with {_said(config, other)}, {why}; leave one "
                "of them out"
            )


def _given(config: Any, name: str) -> bool:
    return bool(getattr(config, name) != getattr(type(config), name))


def _said(config: Any, name: str) -> str:
    value = getattr(config, name)
    if isinstance(value, bool):
        return name if value else f"no-{name.replace('_', '-')}"
    return f"{name} {value}"
