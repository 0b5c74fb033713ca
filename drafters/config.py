"""A target and the draft beside it: the flags of every command that runs such a pair.
Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftsmith.config import option
from draftsmith.errors import UserError

OFFLOADS = ("cpu", "disk")
OFFLOAD_HELP = (
    "run a target that does not fit layer after layer, each read for every pass from the host's "
    "memory (cpu, with CUDA) or from the model's files (disk)"
)
TRUST_HELP = (
    "run Python code that a model's folder brings (auto_map); off, a model that needs it is refused"
)
SAMPLINGS = ("sampled", "greedy")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Pair:
    HELP_TITLE: ClassVar[str] = "target and draft"

    target: str | None = option(None, "the target: a local folder or Hub id")
    draft: str | None = option(None, "the draft: a checkpoint's folder or Hub id")
    draft_revision: str | None = option(None, "branch, tag or commit of a draft from the Hub")
    draft_dtype: str = option(
        "auto", "type of the draft's weights; auto: the target's", choices=DTYPES
    )
    heterogeneous_vocab: bool = option(
        False,
        "the draft is an LM with another tokenizer: it drafts the tokens that both have, "
        "losslessly",
    )
    trust_remote_code: bool = option(False, TRUST_HELP)


def check_draft_options(pair: Pair, *, other_draft: bool = False) -> None:
    """Refuses what is said of a draft where there is none. `other_draft`: weights come from
    elsewhere than `draft`."""
    if pair.draft_dtype not in DTYPES:
        raise UserError(f"draft_dtype is {pair.draft_dtype!r}; give one of {', '.join(DTYPES)}")
    given = {
        "draft_revision": pair.draft_revision is not None,
        "heterogeneous_vocab": pair.heterogeneous_vocab,
        "draft_dtype": pair.draft_dtype != "auto" and not other_draft,
    }
    name = next((name for name, is_given in given.items() if is_given), None)
    if pair.draft is None and name is not None:
        raise UserError(f"{name} is given without a draft; name the draft too or leave it out")


def check_shares(shares: int, command: str) -> None:
    """Raises `UserError` where the processes of `command` make no whole number of copies."""
    running = os.environ.get("WORLD_SIZE") or "1"
    if shares > 1 and int(running) % shares:
        raise UserError(
            f"option 'target_shares' is {shares} but {running} processes run; start a multiple of "
            f"{shares} with torchrun --nproc_per_node N -m draftsmith.cli {command} ..."
        )


def check_offload(offload: str | None, shares: int) -> None:
    """Raises `UserError` for a target that is to run layer after layer where no process has its
    layers by itself."""
    if offload is not None and shares > 1:
        raise UserError(
            f"option 'target_offload' is {offload!r} and 'target_shares' {shares}; leave one of "
            "them out"
        )


def named_folders(entries: Sequence[str]) -> dict[str, str]:
    """`["sql=path"]` -> `{"sql": "path"}`. Raises `UserError` for an entry of another form."""
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, folder = entry.partition("=")
        if not (separator and name.strip() and folder.strip()):
            raise UserError(f"lora is {entry!r}; give NAME=FOLDER, such as sql=runs/sql-adapter")
        if name in found:
            raise UserError(f"lora names {name!r} twice; give each adapter a name of its own")
        found[name] = folder
    return found
