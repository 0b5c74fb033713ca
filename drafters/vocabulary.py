"""Do two tokenizers mean the same by an id? Drafts and targets talk in ids alone."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the mapping from tokens to ids; templates and padding settings do not matter."""
    mapping = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(mapping, ensure_ascii=True).encode()).hexdigest()[:16]


def template_hash(template: str | None) -> str:
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16]


def check_same_ids(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raises a `UserError` that shows a token with two ids."""
    theirs, ours = draft.get_vocab(), target.get_vocab()
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != index:
            found = f"id {theirs[token]} in the draft" if token in theirs else "unknown to the draft"
            raise UserError(
                f"the draft's tokenizer is not the target's: token {token!r} is id {index} in the target and {found}; "
                "use a draft of the same family"
            )
    if surplus := sorted(theirs.keys() - ours.keys()):
        raise UserError(
            f"the draft's tokenizer is not the target's: it has {len(surplus)} more tokens, such as {surplus[0]!r}; "
            "use a draft of the same family"
        )
