"""The target: the model whose output distribution is preserved. Wraps any Hugging Face causal LM,
unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.causal_lm import CausalLM, whole
from draftsmith.drafters.target.load import load_model, load_tokenizer
from draftsmith.drafters.target.offload import weights_here
from draftsmith.drafters.target.packed_pass import positions_of
from draftsmith.drafters.target.probe import TOLERANCE, check_model
from draftsmith.drafters.target.quantised import first_values
from draftsmith.drafters.target.taps import FINAL
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


__all__ = ["FINAL", "Target", "TargetOutput"]
# Values of a parameter that a revision is made of.
FIRST = 64


@dataclass(frozen=True)
class TargetOutput:
    logits: torch.Tensor  # [R, V] float32, of the rows asked for
    taps: torch.Tensor | None  # [T, n * H] of every token
    every: Sequence[torch.Tensor] | None = None  # as `States` has it


class Target(CausalLM):
    """A frozen causal LM with taps. No method records gradients.

    `trust_remote_code` says whether code that a model's folder brings may be run: this target's,
    and that of drafts for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        revision = revision_of(model)  # of its parameters as they are loaded
        super().__init__(model, name, check_model, max_length=max_length)
        self.trust_remote_code = trust_remote_code
        model.requires_grad_(False)
        # `generate` would fill in what it finds there: penalties and filters that are no part of
        # the target's distribution.
        model.generation_config = GenerationConfig()
        # The same weights under other rotary factors have another distribution.
        self.revision = revision + ("-long" if self.has_long_factors else "")
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        *,
        offload: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """A local folder or Hub id; `dtype` "auto" is the checkpoint's own; `max_length` as
        `CausalLM` takes it, `offload` as `load_model` does."""
        model = load_model(
            path, trust_remote_code=trust_remote_code, dtype=dtype, device=device, offload=offload
        )
        return cls(model, str(path), max_length=max_length, trust_remote_code=trust_remote_code)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.name, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention_context: AttentionContext,
        logit_rows: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """A serving pass: input_ids and positions [1, T], logits only at `logit_rows` [R] int64
        (indices into T)."""
        if torch.is_grad_enabled():  # to enter `no_grad` costs as much as a small operation
            with torch.no_grad():
                return self.forward(input_ids, positions, attention_context, logit_rows, taps)
        states = self.paged(input_ids, positions, attention_context, taps)
        rows = states.final[0]
        if not rows.shape[0] == logit_rows.shape[0] == 1:  # to pick is dear on a CPU
            rows = rows[logit_rows]
        logits = super().head(rows).float()
        return TargetOutput(logits, None if states.taps is None else states.taps[0], states.every)

    @torch.no_grad()
    def states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: Sequence[int],
        segments: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A training pass over right-padded texts [B, L] -> (taps [B, L, n * H] or None, hidden [B,
        L, H] for `head`). `segments` as in `drafters/target/packed_pass.py`."""
        self.check_texts(input_ids, attention_mask, segments)
        states = self.full(input_ids, taps, segments)
        is_lost = ~states.final.sum(dim=-1, dtype=torch.float32).isfinite() & attention_mask.bool()
        if bool(is_lost.any()):
            raise UserError(
                f"target {self.name!r} gives states that are NaN or infinite, in {self.dtype} from "
                f"token {int(input_ids[is_lost][0])} on; give another dtype, or another target"
            )
        return states.taps, states.final

    def check_texts(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, segments: torch.Tensor | None
    ) -> None:
        """Raises `ValueError` or `UserError` for texts that `states` cannot read."""
        if (attention_mask.diff(dim=1) > 0).any():
            raise ValueError("attention_mask is padded on the left; pad texts on the right")
        if self.rope_limit is not None:
            longest = (
                input_ids.shape[1] if segments is None else int(positions_of(segments).max()) + 1
            )
            self.check_length(longest, "the longest text of the batch, in tokens,")

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().head(hidden)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids)

    @cached_property
    def _ways(self) -> Ways:
        if not self.state_layers:
            # transformers scales attention by positions that it counts from the padding on.
            return Ways(padded=not getattr(self.config, "attn_temperature_tuning", False))
        if self.state_layers.no_single:
            return Ways(padded=False, use_cache=False)
        return ways_of(self.model, TOLERANCE[self.dtype])

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        seeds: Sequence[int] | None = None,
        batch_size: int = 16,
        ignore_eos: bool = False,
        streamer: BaseStreamer | None = None,
    ) -> list[list[int]]:
        """The target's continuation of each prompt (token ids), an end-of-text token included where
        it reached one.

        `seeds` gives every prompt its own random stream (default: its index), so that an answer
        does not depend on which others share its batch. Where padding would change texts, prompts
        of unlike length are answered singly. `streamer` is given each part's prompts, then the
        tokens of each pass.
        """
        if not prompts:
            return []
        longest = max(len(prompt) for prompt in prompts)
        self.check_length(longest + max_new_tokens, "the longest prompt and its answer, in tokens,")
        if not self._ways.padded and len({len(prompt) for prompt in prompts}) > 1:
            batch_size = 1
        streams = torch.tensor(list(range(len(prompts)) if seeds is None else seeds))
        end_ids = [] if ignore_eos else list(self.eos_token_ids)
        filler = end_ids[0] if end_ids else 0  # is masked out; any id with an embedding will do
        answers: list[list[int]] = []
        for begin in range(0, len(prompts), batch_size):
            part = slice(begin, begin + batch_size)
            ids, padding, mask = _left_padded(prompts[part], filler, self.device)
            size = len(ids)
            rows = SamplingRows.of([temperature] * size, top_k=[top_k] * size, device=self.device)
            draw = SeededDraw(rows, streams[part].to(self.device), padding)
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([draw]),
                eos_token_id=end_ids or None,
                pad_token_id=filler,
                use_cache=self._ways.use_cache,
                streamer=streamer,
            )
            answers += [trim(row, end_ids) for row in output[:, ids.shape[1] :].tolist()]
        return answers


class TargetParameter(NamedTuple):
    name: str
    shape: torch.Size
    first: torch.Tensor  # [at most FIRST]


def revision_of(model: torch.nn.Module) -> str:
    """A digest of a few weights of every parameter: it changes whenever the weights do, for a
    folder as for a Hub id."""
    return digest_of(
        TargetParameter(name, parameter.shape, _first_of(model, name, parameter))
        for name, parameter in model.named_parameters()
    )


def _first_of(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not parameter.is_meta:
        return first_values(whole(parameter.detach()), FIRST)
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    with weights_here(module):
        return first_values(getattr(module, own).detach(), FIRST).clone()


def digest_of(parameters: Iterable[TargetParameter]) -> str:
    """Revision of a model with these parameters, in its order. Rounded to bfloat16 first, so that
    loading in another dtype is the same revision."""
    digest = hashlib.sha256()
    for name, shape, first in parameters:
        values = first.to(torch.bfloat16).float().cpu().numpy()
        digest.update(f"{name} {tuple(shape)}".encode() + values.tobytes())
    return digest.hexdigest()[:16]


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

    def __init__(self, rows: SamplingRows, seeds: torch.Tensor, padding: torch.Tensor):
        self.rows, self.seeds = rows, seeds  # [B] int64
        # [B] int64, left padding of each row: positions are counted without it
        self.padding = padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        positions = input_ids.shape[1] - self.padding
        tokens = draw(scores, self.rows, self.seeds, positions, Purpose.BONUS).tokens
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


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
