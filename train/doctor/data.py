"""Checks of the data: written by the target, masked and cut as training expects it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from draftsmith.drafters.init_from_target import unused_token
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import template_hash, tokenizer_difference
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.data.dataset import open_rows
from draftsmith.train.doctor.data_tokens import (
    Row,
    check_after_end,
    check_known,
    check_template,
    check_unused,
    check_vocabulary,
)
from draftsmith.train.doctor.finding import Finding, fail, ok, refused, warn

SHOWN_TOKENS = 24  # on either side of the first boundary between prompt and answer


class Sample(NamedTuple):
    rows: list[Row]
    total: int  # rows in the folder
    provenance: dict[str, Any]


def read_sample(folder: str, count: int, *, spread: bool = True) -> Sample:
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
    provenance = path / "provenance.json"
    return Sample(
        rows, total, read_json(provenance, "data provenance") if provenance.is_file() else {}
    )


def check_data(folder: str, sample: Sample, target: Target, max_length: int) -> list[Finding]:
    findings = [
        ok(
            "data.reads",
            f"{len(sample.rows)} of {sample.total} rows read, "
            f"{sum(len(row.input_ids) for row in sample.rows)} tokens",
        ),
        check_shapes(sample.rows),
        check_ids(sample.rows, target.vocab_size),
        *check_provenance(sample.provenance, target),
        check_masks(sample.rows),
        check_length(sample.rows, max_length),
    ]
    try:
        tokenizer = target.tokenizer()
    except UserError as error:
        return [*findings, refused("data.text", error)]
    findings += [
        check_known(sample.rows, len(tokenizer), target.vocab_size),
        check_unused(sample.rows, unused_token(target)),
        *check_template(sample.rows, tokenizer),
        check_start(sample.rows, tokenizer.bos_token_id),
        check_ends(sample.rows, target.eos_token_ids),
        check_after_end(sample.rows, target.eos_token_ids),
        check_vocabulary(sample.rows),
    ]
    findings.append(ok("data.text", rendered(sample.rows, tokenizer)))
    return findings


def check_shapes(rows: list[Row]) -> Finding:
    wrong = sum(len(row.input_ids) != len(row.loss_mask) for row in rows)
    if wrong:
        return fail(
            "data.shapes",
            f"{wrong} rows have a loss_mask of another length than input_ids",
            "generate the data again",
        )
    return ok("data.shapes", "every token has its mask entry")


def check_ids(rows: list[Row], vocab_size: int) -> Finding:
    wrong = sorted(
        {token for row in rows for token in row.input_ids if not 0 <= token < vocab_size}
    )
    if wrong:
        return fail(
            "data.ids",
            f"token id {wrong[0]} is outside the target's {vocab_size} ids",
            "generate the data with this target",
        )
    return ok("data.ids", f"all within the target's {vocab_size} ids")


def check_provenance(provenance: dict[str, Any], target: Target) -> list[Finding]:
    if not provenance:
        return [
            warn(
                "data.target",
                "no provenance.json, so the model that wrote the data is unknown",
                "prefer data of draftsmith generate",
            )
        ]
    again = "generate the data with this target"
    findings = []
    if difference := tokenizer_difference(provenance, target.tokenizer()):
        what = (
            f"written with the tokenizer of {provenance.get('target')!r}, another one "
            f"({difference})"
        )
        findings.append(fail("data.tokenizer", what, again))
    if provenance.get("template_hash") != template_hash(target.tokenizer().chat_template):
        findings.append(
            warn("data.template", "written with another chat template than the target's", again)
        )
    if provenance.get("target_revision") != target.revision:
        findings.append(
            warn("data.target", f"written by other weights ({provenance.get('target')!r})", again)
        )
    if not provenance.get("complete", True):
        findings.append(
            warn(
                "data.complete",
                "the generation was interrupted",
                "run the same draftsmith generate again to finish it",
            )
        )
    return findings or [
        ok(
            "data.target",
            f"written by this target, its template, T={provenance.get('temperature')}",
        )
    ]


def check_masks(rows: list[Row]) -> Finding:
    """The first token of a text cannot be predicted, so a mask of it alone is empty too."""
    empty = sum(not any(row.loss_mask[1:]) for row in rows)
    full = sum(all(row.loss_mask) for row in rows)
    if empty == len(rows):
        return fail(
            "data.masks",
            "no row has a token that the target wrote",
            "generate answers; a loss_mask of 1 marks them",
        )
    if empty:
        return warn(
            "data.masks",
            f"{empty} of {len(rows)} rows have nothing to learn from",
            "they are left out of training",
        )
    if full:
        return warn(
            "data.masks",
            f"{full} of {len(rows)} rows have no prompt",
            "check that prompts are masked with 0",
        )
    share = sum(sum(row.loss_mask) for row in rows) / sum(len(row.loss_mask) for row in rows)
    return ok("data.masks", f"{share:.0%} of the tokens are the target's")


def check_length(rows: list[Row], max_length: int) -> Finding:
    cut = sum(len(row.input_ids) > max_length for row in rows)
    lost = sum(
        len(row.input_ids) > max_length and not any(row.loss_mask[1:max_length]) for row in rows
    )
    if lost:
        return warn(
            "data.length",
            f"{lost} of {len(rows)} rows lose all of their answer at {max_length} tokens",
            "raise --max-length",
        )
    if cut:
        return warn(
            "data.length",
            f"{cut} of {len(rows)} rows are cut at {max_length} tokens",
            "raise --max-length if memory allows",
        )
    return ok(
        "data.length",
        f"longest row {max(len(row.input_ids) for row in rows)} tokens, none cut at {max_length}",
    )


def check_start(rows: list[Row], bos: int | None) -> Finding:
    doubled = (
        0 if bos is None else sum((bos, bos) in itertools.pairwise(row.input_ids) for row in rows)
    )
    if doubled:
        return fail(
            "data.bos",
            f"{doubled} of {len(rows)} rows hold two beginning-of-text tokens in a row",
            "encode templated prompts with add_special_tokens=False; served requests will have one",
        )
    return ok("data.bos", "no doubled beginning-of-text token")


def check_ends(rows: list[Row], ends: tuple[int, ...]) -> Finding:
    finished = sum(bool(row.input_ids) and row.input_ids[-1] in ends for row in rows)
    what = f"{finished} of {len(rows)} answers end by themselves"
    if ends and not finished:
        return warn(
            "data.ends",
            what,
            "raise --max-tokens of draftsmith generate, or no draft trained on it drafts an end",
        )
    return ok("data.ends", what)


def rendered(rows: list[Row], tokenizer: Any) -> str:
    """The first row around the first boundary, what the target wrote in [[ ]]."""
    row = next((row for row in rows if any(row.loss_mask)), rows[0])
    boundary = row.loss_mask.index(True) if any(row.loss_mask) else 0
    begin, end = max(0, boundary - SHOWN_TOKENS), boundary + SHOWN_TOKENS
    text = marked(row.input_ids[begin:end], row.loss_mask[begin:end], tokenizer, BRACKETS)
    return (
        ("... " if begin else "") + ascii(text)[1:-1] + (" ..." if end < len(row.input_ids) else "")
    )


def shown(
    folder: str,
    target: str,
    *,
    count: int,
    max_length: int,
    in_colour: bool,
    trust_remote_code: bool = False,
) -> str:
    """The first texts of the data as training reads them, whole."""
    sample = read_sample(folder, count, spread=False)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    parts = []
    for at, row in enumerate(sample.rows, start=1):
        ids, mask = row.input_ids[:max_length], row.loss_mask[:max_length]
        cut = f", cut from {len(row.input_ids)}" if len(row.input_ids) > max_length else ""
        text = marked(ids, mask, HarmlessDecoder(tokenizer), COLOUR if in_colour else BRACKETS)
        parts.append(f"--- row {at}: {len(ids)} tokens{cut}, {sum(mask)} trained\n{text}")
    return "\n".join(parts)


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class Marks(NamedTuple):
    """Text around a stretch of trained tokens."""

    begin: str
    end: str


BRACKETS = Marks("[[", "]]")

COLOUR = Marks("\x1b[30;42m", "\x1b[0m")  # black on green


def marked(
    input_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: Decoder, marks: Marks
) -> str:
    parts = []
    for is_trained, run in itertools.groupby(
        zip(input_ids, loss_mask), key=lambda pair: bool(pair[1])
    ):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        parts.append(f"{marks.begin}{text}{marks.end}" if is_trained else text)
    return "".join(parts)


class HarmlessDecoder(NamedTuple):
    """Gives text without characters that could steer a terminal."""

    tokenizer: Decoder

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return "".join(
            letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
            for letter in text
        )
