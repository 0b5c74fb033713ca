"""Comparison of two tokenizers' ids: drafts and targets exchange ids alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError

SHOWN = 3  # tokens named where two tokenizers differ
SAMPLED = 128  # tokens that a record keeps


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the mapping from tokens to ids; templates and padding settings do not matter."""
    mapping = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(mapping, ensure_ascii=True).encode()).hexdigest()[:16]


def tokenizer_record(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Record of a tokenizer that may not be at hand later: a hash, and enough tokens to show a
    difference."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    sampled = sorted(names)[:: -(-len(names) // SAMPLED)]
    shown = sorted({*sampled, *tokenizer.all_special_ids})
    return {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "tokenizer": {"size": len(names), "tokens": [[index, names[index]] for index in shown]},
    }


def tokenizer_difference(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Difference between a `record` by `tokenizer_record` and this tokenizer, in words; None where
    there is none or nothing was recorded."""
    digests = record.get("tokenizer_hash"), tokenizer_hash(tokenizer)
    if digests[0] in (None, digests[1]):
        return None
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    recorded = record.get("tokenizer", {"size": len(names), "tokens": []})
    moved = [(index, token) for index, token in recorded["tokens"] if names.get(index) != token]
    shown = [
        f"id {index} is {token!r} and {names.get(index, 'unknown')!r}"
        for index, token in moved[:SHOWN]
    ]
    if recorded["size"] != len(names):
        shown.insert(0, f"{recorded['size']} tokens and {len(names)}")
    return ", ".join(shown) or f"digests {digests[0]} and {digests[1]}"


def template_hash(template: str | None) -> str:
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16]


def check_same_ids(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raise a `UserError` that shows the difference where two tokenizers differ."""
    theirs, ours = draft.get_vocab(), target.get_vocab()
    moved = [
        token
        for token, index in sorted(ours.items(), key=lambda item: item[1])
        if theirs.get(token) != index
    ]
    surplus = sorted(theirs.keys() - ours.keys())
    if not moved and not surplus:
        return
    shown = [
        f"{token!r} is {ours[token]} and {theirs.get(token, 'unknown')}" for token in moved[:SHOWN]
    ]
    shown += [
        f"{token!r} is unknown and {theirs[token]}" for token in surplus[: SHOWN - len(shown)]
    ]
    raise UserError(
        f"the draft's tokenizer is not the target's: the target's {len(ours)} tokens and the "
        f"draft's {len(theirs)} differ in "
        f"{len(moved) + len(surplus)}, by their ids {', '.join(shown)}; use a draft of the same "
        "family, or serve a draft LM with "
        "--heterogeneous-vocab"
    )


class SharedTokens(NamedTuple):
    """Tokens that stand for the same text in both, and what to read in a draft LM in place of each
    of the target's."""

    target_ids: torch.Tensor  # [S] ascending
    draft_ids: torch.Tensor  # [S] the same tokens
    to_draft: torch.Tensor  # [V] for every id of the target


def shared_tokens(
    draft: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    *,
    draft_size: int,
    target_size: int,
) -> SharedTokens:
    """A token of the target that the draft lacks is read as the last of the draft's tokens for its
    text."""
    theirs = {
        plain(token): index for token, index in draft.get_vocab().items() if index < draft_size
    }
    ours = {
        plain(token): index for token, index in target.get_vocab().items() if index < target_size
    }
    pairs = {index: theirs[token] for token, index in ours.items() if token in theirs}
    if target.eos_token_id is not None and draft.eos_token_id is not None:
        # Ends of text are spelt differently and mean the same.
        pairs = {mine: other for mine, other in pairs.items() if other != draft.eos_token_id}
        pairs[target.eos_token_id] = draft.eos_token_id
    missing = [index for index in ours.values() if index not in pairs]
    spelt = (
        draft(target.batch_decode([[index] for index in missing]), add_special_tokens=False)[
            "input_ids"
        ]
        if missing
        else []
    )
    to_draft = torch.full((target_size,), unknown(draft))
    for index, pieces in zip(missing, spelt, strict=True):
        to_draft[index] = pieces[-1] if pieces else to_draft[index]
    target_ids = torch.tensor(sorted(pairs))
    draft_ids = torch.tensor([pairs[index] for index in sorted(pairs)])
    to_draft[target_ids] = draft_ids
    return SharedTokens(target_ids, draft_ids, to_draft)


def plain(token: str) -> str:
    """Byte-level and SentencePiece vocabularies write a space, and a new line, in their
    own ways."""
    return token.replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n")


def unknown(tokenizer: PreTrainedTokenizerBase) -> int:
    for index in (tokenizer.unk_token_id, tokenizer.eos_token_id):
        if index is not None:
            return index
    return 0
