"""Checks of the data: written by the target, masked and cut as training expects it; its tokens
under the target's distributions. B = 1, L tokens, V vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.chats import PROBE, rendered
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import template_hash, tokenizer_difference
from draftsmith.errors import UserError
from draftsmith.progress import say
from draftsmith.train.check.finding import Finding, fail, ok, refused, warn
from draftsmith.train.data.dataset import open_rows, provenance_of


class Row(NamedTuple):
    input_ids: list[int]
    loss_mask: list[bool]  # True where the target wrote the token


class DataSample(NamedTuple):
    rows: list[Row]
    total: int  # rows in the folder
    provenance: dict[str, Any]


def read_sample(folder: str, count: int, *, spread: bool = True) -> DataSample:
    """`count` rows spread evenly over the folder, or the first ones."""
    path = Path(folder)
    table = open_rows(path)
    total = len(table)
    if total == 0:
        raise UserError(f"data {folder!r} has no rows; generate answers for some prompts")
    last = total if spread else min(count, total)
    chosen = sorted({int(index) for index in torch.linspace(0, last - 1, min(count, total))})
    rows = [
        Row(row["input_ids"], [bool(bit) for bit in row["loss_mask"]])
        for row in table.select(chosen)
    ]
    return DataSample(rows, total, provenance_of(path))


def check_data(sample: DataSample, target: Target, max_length: int) -> list[Finding]:
    rows = sample.rows
    tokens = sum(len(row.input_ids) for row in rows)
    findings = [
        ok("data.reads", f"{len(rows)} of {sample.total} rows read, {tokens} tokens"),
        check_ids(rows, target.vocab_size),
        check_masks(rows),
        check_length(rows, max_length),
        check_after_end(rows, target.eos_token_ids),
    ]
    try:
        tokenizer = target.tokenizer()
        chats = chats_of(rows, tokenizer)
    except UserError as error:
        return [*findings, refused("data.tokenizer", error)]
    return [
        *findings,
        check_start(rows, tokenizer.bos_token_id),
        *([check_ends(chats, target.eos_token_ids)] if chats else []),
        *check_provenance(sample.provenance, target),
    ]


def check_ids(rows: list[Row], vocab_size: int) -> Finding:
    if any(len(row.input_ids) != len(row.loss_mask) for row in rows):
        what = "a row has a loss_mask of another length than its input_ids"
        return fail("data.ids", what, "generate the data again")
    wrong = {token for row in rows for token in row.input_ids if not 0 <= token < vocab_size}
    if wrong:
        what = f"token id {min(wrong)} is outside the target's {vocab_size} ids"
        return fail("data.ids", what, "generate the data with this target")
    return ok("data.ids", f"all within the target's {vocab_size} ids")


def check_provenance(provenance: dict[str, Any], target: Target) -> list[Finding]:
    """Finds answers of another target, and a generation that was interrupted."""
    if not provenance:
        what = "no provenance.json, so the model that wrote the data is unknown"
        return [warn("data.target", what, "prefer data of draftsmith generate")]
    again = "generate the data with this target"
    findings = []
    if difference := tokenizer_difference(provenance, target.tokenizer()):
        what = (
            f"written with the tokenizer of {provenance.get('target')!r}, another one "
            f"({difference})"
        )
        findings.append(fail("data.tokenizer", what, again))
    if provenance.get("template_hash") != template_hash(target.tokenizer().chat_template):
        what = "written with another chat template than the target's"
        findings.append(warn("data.template", what, again))
    revision = provenance.get("target_revision")  # None: a server does not say its own
    if revision not in (None, target.revision):
        what = f"written by other weights ({provenance.get('target')!r})"
        findings.append(warn("data.target", what, again))
    if not provenance.get("complete", True):
        mend = "run the same draftsmith generate again to finish it"
        findings.append(warn("data.complete", "the generation was interrupted", mend))
    writer = "a server of this target" if revision is None else "this target"
    what = f"written by {writer}, its template, T={provenance.get('temperature')}"
    return findings or [ok("data.target", what)]


def check_masks(rows: list[Row]) -> Finding:
    """Finds rows without an answer. The first token of a text cannot be predicted, so a mask of it
    alone is empty too."""
    empty = sum(not any(row.loss_mask[1:]) for row in rows)
    full = sum(all(row.loss_mask) for row in rows)
    if empty == len(rows):
        what = "no row has a token that the target wrote"
        return fail("data.masks", what, "generate answers; a loss_mask of 1 marks them")
    if empty:
        what = f"{empty} of {len(rows)} rows have nothing to learn from"
        return warn("data.masks", what, "they are left out of training")
    if full:
        what = f"{full} of {len(rows)} rows have no prompt"
        return warn("data.masks", what, "check that prompts are masked with 0")
    share = sum(sum(row.loss_mask) for row in rows) / sum(len(row.loss_mask) for row in rows)
    return ok("data.masks", f"{share:.0%} of the tokens are the target's")


def check_length(rows: list[Row], max_length: int) -> Finding:
    cut = [row for row in rows if len(row.input_ids) > max_length]
    lost = sum(not any(row.loss_mask[1:max_length]) for row in cut)
    if lost:
        what = f"{lost} of {len(rows)} rows lose all of their answer at {max_length} tokens"
        return warn("data.length", what, "raise --max-length")
    if cut:
        what = f"{len(cut)} of {len(rows)} rows are cut at {max_length} tokens"
        return warn("data.length", what, "raise --max-length if memory allows")
    longest = max(len(row.input_ids) for row in rows)
    return ok("data.length", f"longest row {longest} tokens, none cut at {max_length}")


def check_start(rows: list[Row], bos: int | None) -> Finding:
    doubled = (
        0 if bos is None else sum((bos, bos) in itertools.pairwise(row.input_ids) for row in rows)
    )
    if doubled:
        what = f"{doubled} of {len(rows)} rows hold two beginning-of-text tokens in a row"
        mend = "encode templated prompts with add_special_tokens=False, as they are served"
        return fail("data.bos", what, mend)
    return ok("data.bos", "no doubled beginning-of-text token")


def check_after_end(rows: list[Row], ends: Collection[int]) -> Finding:
    """Finds masks that go on behind an end of text, where the target writes nothing."""
    wrong = sum(
        any(
            masked and before and token in ends
            for token, before, masked in zip(row.input_ids, row.loss_mask, row.loss_mask[1:])
        )
        for row in rows
    )
    if wrong:
        what = f"{wrong} of {len(rows)} rows train on tokens after the end of an answer"
        mend = "end masks with the end-of-text token, as draftsmith generate --keep-answers does"
        return warn("data.mask-end", what, mend)
    return ok("data.mask-end", "no mask goes on after the end of an answer")


def chats_of(rows: list[Row], tokenizer: Any) -> list[Row]:
    """Rows that hold the added tokens before a user's message, all rows where the template has
    none there."""
    if not tokenizer.chat_template:
        return []
    # Ends of text may stand before it, in a system message that a row need not have.
    text = rendered([{"role": "user", "content": PROBE}], tokenizer).partition(PROBE)[0]
    before = set(tokenizer.encode(text, add_special_tokens=False))
    marks = before & tokenizer.added_tokens_decoder.keys() - {
        tokenizer.bos_token_id, tokenizer.eos_token_id
    }  # fmt: skip
    return [row for row in rows if marks <= set(row.input_ids)]


def check_ends(rows: list[Row], ends: Collection[int]) -> Finding:
    """Finds chats that were mostly cut off: only answers that end show a draft where answers do."""
    answers = [list(itertools.compress(*row)) for row in rows]
    ended = sum(bool(answer) and answer[-1] in ends for answer in answers)
    what = f"{ended} of {len(rows)} answers end by themselves"
    mend = "generate with a larger --max-tokens, or training and tau are of first words alone"
    return ok("data.ends", what) if 2 * ended >= len(rows) else warn("data.ends", what, mend)


def shown(folder: str, tokenizer: Any, *, count: int, max_length: int) -> str:
    """The first texts of the data as training reads them, trained tokens in [[ ]]."""
    parts = []
    for at, row in enumerate(read_sample(folder, count, spread=False).rows, start=1):
        ids, mask = row.input_ids[:max_length], row.loss_mask[:max_length]
        cut = f", cut from {len(row.input_ids)}" if len(row.input_ids) > max_length else ""
        text = marked(ids, mask, tokenizer)
        parts.append(f"--- row {at}: {len(ids)} tokens{cut}, {sum(mask)} trained\n{text}\n")
    return "\n".join(parts)


def marked(input_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: Any) -> str:
    """Text without characters that could steer a terminal."""
    parts = []
    for is_trained, run in itertools.groupby(zip(input_ids, loss_mask), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        parts.append(f"[[{text}]]" if is_trained else text)
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in "".join(parts)
    )


MAX_ROWS, MAX_LENGTH = 32, 1024
FOREIGN_GAP = 0.3  # nats per token
FOREIGN_SIGMAS = 6.0
GREEDY_AGREEMENT = 0.98


class RowStats(NamedTuple):
    """Statistics of the n tokens of a row that the target wrote, as the mask has it."""

    gap: torch.Tensor  # [n] -log p(token), less what that is on average for a token drawn from p
    greedy: torch.Tensor  # [n] bool, the token is p's likeliest


@torch.no_grad()
def check_distribution(sample: DataSample, target: Target) -> list[Finding]:
    temperature = sampled_at(sample.provenance)
    if temperature not in (0.0, 1.0):
        return []
    say("comparing the texts of the data with the target's own")
    stats = [one for row in sample.rows[:MAX_ROWS] if (one := row_stats(row, target)) is not None]
    return [check_own_text(stats, temperature)] if stats else []


def sampled_at(provenance: dict[str, Any]) -> float | None:
    """The temperature, where the text was drawn from one whole distribution; a greedy choice no
    filter changes."""
    temperature = provenance.get("temperature")
    if isinstance(temperature, list):
        return None
    filtered = provenance.get("top_k", 0) != 0 or provenance.get("top_p", 1.0) != 1.0
    return None if filtered and temperature != 0 else temperature


def row_stats(row: Row, target: Target) -> RowStats | None:
    length = min(MAX_LENGTH, target.max_positions)
    ids = torch.tensor([row.input_ids[:length]], device=target.device)
    mask = torch.tensor(row.loss_mask[:length], device=target.device)
    positions = mask[1:].nonzero()[:, 0] + 1
    if not len(positions):
        return None
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    logits = target.head(hidden[0, positions - 1]).float()
    logprobs = logits.log_softmax(dim=-1)
    tokens = ids[0, positions]
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1)
    return RowStats(
        gap=-logprobs.gather(1, tokens[:, None])[:, 0] - entropy,
        greedy=logprobs.argmax(dim=-1) == tokens,
    )


def check_own_text(stats: list[RowStats], temperature: float | None) -> Finding:
    """Finds text of another model: a draft trained on it matches a distribution that nothing
    serves."""
    if temperature == 0.0:
        share = torch.cat([row.greedy for row in stats]).float().mean().item()
        what = f"{share:.1%} of the tokens are the target's greedy choice"
        is_foreign = share < GREEDY_AGREEMENT
    else:
        gap = torch.cat([row.gap for row in stats]).double()
        # Surprises of successive samples minus their conditional means are uncorrelated, so the
        # plain standard error holds.
        sigmas = float(gap.mean() / (gap.std(correction=0) / len(gap) ** 0.5).clamp(min=1e-9))
        what = f"{gap.mean():+.2f} nats per token beside the target's own samples"
        is_foreign = bool(gap.mean() > FOREIGN_GAP) and sigmas > FOREIGN_SIGMAS
    mend = "generate the data with this target; a draft trained on foreign text accepts less"
    return warn("data.distribution", what, mend) if is_foreign else ok("data.distribution", what)
