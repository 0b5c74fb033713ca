"""Checks of the data's tokens, and their consequences for a draft trained on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Protocol

from draftsmith.chats.template import ChatTokenizer, rendered
from draftsmith.errors import UserError
from draftsmith.train.doctor.finding import Finding, ok, warn

WANTED_COVER = 0.99
FEW_TOKENS = 2000  # of answers; fewer are too few to size a vocabulary


class Row(NamedTuple):
    input_ids: list[int]
    loss_mask: list[bool]  # True where the target wrote the token


class SpecialTokenizer(ChatTokenizer, Protocol):
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def check_known(rows: list[Row], num_known: int, vocab_size: int) -> Finding:
    """Heads are often padded beyond the tokenizer; what is there was never trained."""
    wrong = sorted(
        {token for row in rows for token in row.input_ids if num_known <= token < vocab_size}
    )
    if wrong:
        what = (
            f"token id {wrong[0]} is beyond the tokenizer's {num_known} tokens, in the padding of "
            f"the head ({vocab_size})"
        )
        return warn("data.padding", what, "generate the data with this target's tokenizer")
    return ok("data.padding", f"all within the tokenizer's {num_known} tokens")


def check_unused(rows: list[Row], mask_token: int) -> Finding:
    found = sum(mask_token in row.input_ids for row in rows)
    if found:
        what = (
            f"{found} of {len(rows)} rows hold token {mask_token}, which stands for unknown "
            "tokens in block drafts"
        )
        return warn(
            "data.mask-token",
            what,
            "give dflash, dspark and p-eagle a mask_token that no text holds",
        )
    return ok(
        "data.mask-token",
        f"no row holds token {mask_token}, which block drafts use for unknown ones",
    )


def check_after_end(rows: list[Row], ends: Collection[int]) -> Finding:
    """Finds masks that go on behind an end of text, where the target writes nothing."""
    wrong = sum(
        any(
            row.loss_mask[at] and row.loss_mask[at - 1] and row.input_ids[at - 1] in ends
            for at in range(1, min(len(row.input_ids), len(row.loss_mask)))
        )
        for row in rows
    )
    if wrong:
        what = (
            f"{wrong} of {len(rows)} rows train on tokens after the end of an answer, which the "
            "target never writes"
        )
        return warn(
            "data.mask-end",
            what,
            "end masks with the end-of-text token, as draftsmith generate --keep-answers does",
        )
    return ok("data.mask-end", "no mask goes on after the end of an answer")


def check_template(rows: list[Row], tokenizer: SpecialTokenizer) -> list[Finding]:
    """A chat model is served templated text; text without a token of the template is
    another kind."""
    if not tokenizer.chat_template:
        return []
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = rendered(chat, tokenizer, add_generation_prompt=False)
    except UserError:
        return []  # a template that needs more than a question and an answer
    special = {*tokenizer.encode(text, add_special_tokens=False)} & {*tokenizer.all_special_ids}
    if not special:
        return []  # no token distinguishes a chat of this template from other text
    without = sum(not special & set(row.input_ids) for row in rows)
    if without == len(rows):
        what = "no row holds a special token of the target's chat template"
        return [
            warn(
                "data.chat",
                what,
                "if chats will be served, generate with --chat always or from `messages`",
            )
        ]
    if without:
        what = (
            f"{without} of {len(rows)} rows hold no special token of the target's chat template, "
            "the others do"
        )
        return [warn("data.chat", what, "check that plain text among chats is meant")]
    return [ok("data.chat", "every row holds special tokens of the target's chat template")]


def check_vocabulary(rows: list[Row]) -> Finding:
    """Size of the draft vocabulary that covers the answers: counted on every other row, measured on
    the rest."""
    counted, measured = Counter[int](), Counter[int]()
    for at, row in enumerate(rows):
        (measured if at % 2 else counted).update(
            token for token, bit in zip(row.input_ids, row.loss_mask) if bit
        )
    total = measured.total()
    if min(total, counted.total()) < FEW_TOKENS:
        return ok(
            "data.vocabulary",
            f"too few tokens of answers to size a draft vocabulary ({total + counted.total()})",
        )
    covered = 0
    for size, (token, _) in enumerate(counted.most_common(), start=1):
        covered += measured[token]
        if covered >= WANTED_COVER * total:
            share = covered / total
            hold = f"the {size} most frequent tokens cover {share:.1%} of unseen answers"
            return ok(
                "data.vocabulary",
                f"{hold}: as a draft vocabulary they allow an alpha of at most {share:.3f}",
            )
    what = (
        f"all {len(counted)} tokens of half of the rows cover {covered / total:.1%} of the other "
        "half's answers"
    )
    return warn(
        "data.vocabulary",
        what,
        "keep the whole vocabulary, or count a draft_vocab_size on more text than this",
    )
