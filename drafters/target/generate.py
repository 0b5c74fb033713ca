"""Batched answers of a target through transformers' own generation, drawn from our
random streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose


@dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """One distribution for a whole call; the defaults are greedy and unfiltered."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Ways(NamedTuple):
    """Ways of transformers' generation in which texts are those of the model's whole forward."""

    padded: bool = True  # prompts of unlike length together
    use_cache: bool = True


class SeededDraw(LogitsProcessor):
    """Replaces each row of scores by the one-hot choice its own random stream makes, so that greedy
    search follows it.

    A row's tokens then depend on its seed and text alone (up to rounding), not on its neighbours in
    the batch: a killed generation resumes with the same answers. The engine draws tokens it did not
    speculate on from the same stream.
    """

    def __init__(self, sampling: AnswerSampling, seeds: torch.Tensor, padding: torch.Tensor):
        self.seeds = seeds  # [B] int64
        # [B] int64, left padding of each row: positions are counted without it
        self.padding = padding
        size = len(seeds)
        self.rows = SamplingRows.of(
            [sampling.temperature] * size,
            top_k=[sampling.top_k] * size,
            top_p=[sampling.top_p] * size,
            min_p=[sampling.min_p] * size,
            device=seeds.device,
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        positions = input_ids.shape[1] - self.padding
        tokens = draw(scores, self.rows, self.seeds, positions, Purpose.BONUS).tokens
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def answer_chunks(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: AnswerSampling,
    seeds: Sequence[int],
    eos_token_ids: Sequence[int],
    batch_size: int,
    ways: Ways,
) -> Iterator[list[list[int]]]:
    """The answers of `batch_size` prompts at a time, in order; each ends with its end-of-text token
    if it reached one. Where `ways` are not `padded`, prompts of unlike
    length are answered singly."""
    if not ways.padded and len({len(prompt) for prompt in prompts}) > 1:
        batch_size = 1
    for begin in range(0, len(prompts), batch_size):
        chunk = prompts[begin : begin + batch_size]
        yield _answer(
            model,
            chunk,
            max_new_tokens,
            sampling,
            seeds[begin : begin + batch_size],
            list(eos_token_ids),
            ways.use_cache,
        )


@torch.no_grad()
def _answer(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: AnswerSampling,
    seeds: Sequence[int],
    eos_token_ids: list[int],
    use_cache: bool,
) -> list[list[int]]:
    # Padding is masked out; any id with an embedding will do.
    filler = eos_token_ids[0] if eos_token_ids else 0
    ids, padding, mask = _left_padded(prompts, filler, model.device)
    width = ids.shape[1]
    draw = SeededDraw(sampling, torch.tensor(list(seeds), device=model.device), padding)
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([draw]),
        eos_token_id=eos_token_ids or None,
        pad_token_id=filler,
        use_cache=use_cache,
    )
    return [trim(row, eos_token_ids) for row in output[:, width:].tolist()]


def _left_padded(
    prompts: Sequence[Sequence[int]], filler: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B, L], lengths of the padding [B], mask [B, L]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor(
        [[filler] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    mask = (torch.arange(width, device=device) >= padding[:, None]).long()
    return ids, padding, mask


@torch.no_grad()
def ways_of(model: PreTrainedModel, tolerance: float) -> Ways:
    """Tries both on short texts. `tolerance` of logits is a share of their spread.

    Some layers with a state read padding into it, or begin a text with the state of another.
    """
    prompts = [list(range(2, 14)), [5], list(range(9, 4, -1))]
    if not all(_agrees(model, [prompt], tolerance) for prompt in prompts):
        return Ways(padded=False, use_cache=False)
    return Ways(padded=_agrees(model, prompts, tolerance))


def _agrees(model: PreTrainedModel, prompts: list[list[int]], tolerance: float) -> bool:
    ids, _, mask = _left_padded(prompts, 0, model.device)
    # The second time shows what a layer keeps of the texts before.
    for _ in range(2):
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    generated = torch.stack(output.logits, dim=1)
    for prompt, text, found in zip(prompts, output.sequences, generated, strict=True):
        whole = model(input_ids=text[None, ids.shape[1] - len(prompt) :], use_cache=False).logits
        wanted = whole[0, len(prompt) - 1 : -1].float()
        if not (found - wanted).abs().max() <= tolerance * wanted.std():
            return False
    return True


def trim(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Everything up to and including the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens
