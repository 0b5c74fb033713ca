"""Draft checkpoints: `config.json` and `model.safetensors` in the family's portable names, and our
record `draftsmith.json`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from draftsmith import files
from draftsmith.drafters import versions
from draftsmith.drafters.config import Pair
from draftsmith.drafters.interface import Family, TrainedDrafter
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.layouts.hub import WEIGHT_FILES, snapshot
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.lm.foreign_lm import ForeignLm
from draftsmith.drafters.registry import FAMILIES, family_of
from draftsmith.drafters.target.device import DTYPES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_difference, tokenizer_record
from draftsmith.errors import UserError, first_line

SCHEMA_VERSION = 1
RECORD = "draftsmith.json"

log = logging.getLogger(__name__)


class Saveable(Protocol):
    @property
    def family(self) -> str: ...

    def save(self, folder: Path) -> None: ...


def save(
    drafter: Saveable,
    folder: str | Path,
    target: Target,
    *,
    training: dict[str, Any] | None = None,
    evaluation: list[dict[str, Any]] | None = None,
) -> None:
    """Writes the draft's files into `folder`, each one whole, and leaves other files there alone.
    The record comes last."""
    folder = Path(folder)
    drafter.save(folder)
    record = {
        "schema": SCHEMA_VERSION,
        "family": drafter.family,
        "target": identity(target),
        "training": training or {},
        "evaluation": evaluation or [],
    }
    files.write_json(folder / RECORD, record)


def load(
    folder: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    foreign: bool = False,
) -> TrainedDrafter:
    """The draft in evaluation mode on the target's device, in `dtype` (default: the target's).

    `folder` may also be a Hub id, of which `revision` names a branch, tag or commit, and a draft
    made elsewhere without our record. Raises `UserError` for a draft that is missing, damaged, or
    made for another vocabulary or tokenizer. `foreign`: any causal LM, whatever its tokenizer, as a
    draft of the tokens that both have.
    """
    folder = locate(folder, revision=revision)
    with one_sentence(folder):
        family = foreign_at(folder, target) if foreign else family_at(folder, target)
        drafter = family.load(folder, target)
    return drafter.to(device=target.device, dtype=dtype or target.dtype).eval()


def family_at(folder: Path, target: Target) -> Family:
    """Family of the folder, by our record or by what is in it, once the record fits the target."""
    record = read_metadata(folder) if (folder / RECORD).is_file() else None
    if record is not None:
        check_target(record, target, folder)
    family = record["family"] if record is not None else family_of(DraftFolder(folder), target)
    if family not in FAMILIES:
        raise UserError(
            f"{str(folder)!r} is a draft of family {family!r}; known ones are {', '.join(FAMILIES)}"
        )
    return FAMILIES[family]


def load_draft(pair: Pair, target: Target) -> TrainedDrafter | None:
    """The draft that was asked for, as it was asked for."""
    if pair.draft is None:
        return None
    return load(
        pair.draft,
        target,
        dtype=DTYPES.get(pair.draft_dtype),
        revision=pair.draft_revision,
        foreign=pair.heterogeneous_vocab,
    )


def foreign_at(folder: Path, target: Target) -> Family:
    family = family_of(DraftFolder(folder), target)
    if family != DraftLm.family:
        raise UserError(
            f"{str(folder)!r} is a draft of family {family!r}, which has no tokenizer of its own; "
            "leave heterogeneous_vocab out"
        )
    return ForeignLm


@contextmanager
def one_sentence(folder: Path) -> Iterator[None]:
    """Turns whatever a folder made elsewhere sets off into a `UserError`: what its files may hold
    has no end, and a library that reads them raises as it likes."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.debug("draft %s cannot be read", folder, exc_info=True)
        raise UserError(
            f"draft {str(folder)!r} cannot be read ({type(error).__name__}: {first_line(error)}); "
            "check its config.json against its weights, or use another draft"
        ) from error


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """`draftsmith.json`, checked to be one."""
    path = Path(folder) / RECORD
    record = files.read_json(path, "draft record")
    if record.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"draft record {str(path)!r} is not of schema {SCHEMA_VERSION}; train the draft again "
            "or update draftsmith"
        )
    for key in ("family", "target"):
        if key not in record:
            raise UserError(f"draft record {str(path)!r} lacks {key!r}; restore the file")
    return record


def training_of(draft: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Record of the draft's training; empty where it was made elsewhere."""
    where = locate(draft, revision=revision)
    return read_metadata(where).get("training", {}) if (where / RECORD).is_file() else {}


def trained_k(draft: str | Path, *, revision: str | None = None) -> int | None:
    """Draft positions that a draft was trained for, by the record of its training."""
    config = training_of(draft, revision=revision).get("config", {})
    return config.get("unroll", {}).get("steps")


def store_evaluation(folder: str | Path, evaluation: list[dict[str, Any]]) -> None:
    """One entry a temperature and way of drafting."""
    record = read_metadata(folder)
    files.write_json(Path(folder) / RECORD, {**record, "evaluation": evaluation})


def draft_sampling_of(evaluation: Mapping[str, Any]) -> str:
    """Drafts of a recorded evaluation; "sampled" in older ones."""
    return str(evaluation.get("draft_sampling", "sampled"))


def identity(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "revision": target.revision,
        "vocab_size": target.vocab_size,
        **tokenizer_record(target.tokenizer()),
    }


def check_target(record: dict[str, Any], target: Target, folder: Path) -> None:
    made_for = record["target"]
    if difference := tokenizer_difference(made_for, target.tokenizer()):
        raise UserError(
            f"draft {str(folder)!r} was made for the tokenizer of {made_for.get('name')!r}; that "
            f"of target {target.name!r} is "
            f"another one ({difference}); train a draft for this target"
        )
    if made_for.get("vocab_size") != target.vocab_size:
        raise UserError(
            f"draft {str(folder)!r} was made for a vocabulary of {made_for.get('vocab_size')} "
            f"({made_for.get('name')!r}), target "
            f"{target.name!r} has {target.vocab_size}; train a draft for this target"
        )
    if made_for.get("revision") != target.revision:
        # Lossless all the same, and often useful: a fine-tuned target with the draft of its base.
        log.warning(
            "draft %s was trained for other weights of its target; expect a lower acceptance",
            folder,
        )


def locate(
    path: str | Path, what: str = "draft", *, weights: bool = True, revision: str | None = None
) -> Path:
    """The local folder of a path or Hub id; an error calls it `what`. Without `weights`, no weights
    are downloaded. A folder of versions stands for its live one."""
    folder = Path(model_folder(path, weights=weights) if what == "target" else path)
    if folder.is_dir():
        if revision is not None:
            raise UserError(
                f"revision {revision!r} is asked of {what} {str(path)!r}, a local folder, which "
                "has but one; leave it out"
            )
        version = versions.latest(folder)
        return folder if version is None else versions.folder_of(folder, version)
    return snapshot(str(path), what, revision=revision, without=() if weights else WEIGHT_FILES)
