"""Any Hugging Face causal LM, unchanged, as two parts: a body (tokens -> hidden states, taps) and a
head (hidden -> logits).

The target and a draft language model are both one of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from draftsmith.drafters.quirks.patches import patch, running
from draftsmith.drafters.quirks.recurrent import StateLayers
from draftsmith.drafters.quirks.recurrent_states import StateSlots
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.limits import lengthen, rope_limit
from draftsmith.drafters.target.packed_pass import PackedPass, positions_of
from draftsmith.drafters.target.quantised import effective_weight, has_numbers
from draftsmith.drafters.target.taps import FINAL, body_name, captured, check_taps, decoder_layers
from draftsmith.drafters.weights import weight_bytes
from draftsmith.kernels.attention.pool import LayerShape, PagedPool
from draftsmith.kernels.products.narrow_products import faster_linears

# Longest text of a model that counts no positions, as Mamba.
NO_POSITIONS = 131_072


class PassProbe(NamedTuple):
    """Shapes of a model, as a probe pass found them."""

    hidden_size: int
    vocab_size: int
    layers: list[LayerShape]


class Replayed(Protocol):
    """A forward pass that replays a capture of the model's own."""

    def __call__(
        self, *inputs: torch.Tensor, attention_context: AttentionContext | None = None
    ) -> Any: ...

    def refresh(self) -> None:
        """Takes up weights that were written in place."""


class CapturedLm(NamedTuple):
    # (input_ids [1, T], positions [1, T]) -> (final state, raw tap 0, ..., raw tap L), each [1, T,
    # H]
    body: Replayed
    head: Replayed  # [1, R, H] -> [1, R, V]


@dataclass(frozen=True)
class States:
    """States of the body for [B, T] tokens."""

    final: torch.Tensor  # [B, T, H], what the head multiplies
    taps: torch.Tensor | None  # [B, T, n * H] in the order asked for; None when none were
    # of a captured pass without taps, by 1 + raw id: `FINAL`, 0, ..., L, [B, T, H] each
    every: Sequence[torch.Tensor] | None = None


class CausalLM:
    """`model` must have been loaded with our attention (`load.load_model`); `check`
    (`probe.check_model`) runs it and gives its shapes. `max_length` is the length in tokens that it
    is served or trained for; a LongRoPE model has the factors of texts so long in every pass.

    Raises `UserError` for a model that does not honour the attention interface, whose keys and
    values could then not be kept in our pool.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        check: Callable[[CausalLM], PassProbe],
        *,
        max_length: int | None = None,
    ):
        self.model = model
        self.name = name
        self.config = model.config.get_text_config()
        self.max_length = max_length
        self.rope_limit = rope_limit(self.config)
        self.has_long_factors = False
        if max_length is not None and self.rope_limit is not None and lengthen(model, max_length):
            self.rope_limit = rope_limit(self.config, lengthened=max_length)
            self.has_long_factors = True
        patch(model)
        self._body_name = body_name(model)
        self.layers = decoder_layers(self.body, self.config.num_hidden_layers)
        self.num_layers = len(self.layers)
        self.eos_token_ids = end_ids(model.generation_config, model.config)
        self._head = _head_alone(model, self._body_name)
        self._unused_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._captured: CapturedLm | None = None
        self.state_layers = StateLayers()
        self._probe = check(self)
        self._table: torch.Tensor | None = None  # of a quantised head

    def replay(self, forwards: CapturedLm | None) -> None:
        """Runs `paged` and `head` from captured `forwards` (`compiled.captured.capture_lm`): the
        same numbers to float rounding. Weights may be written in place afterwards if `refresh` is
        called then."""
        self._captured = forwards

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """Runs the model's own forward in place of its captured one."""
        forwards, self._captured = self._captured, None
        try:
            yield
        finally:
            self._captured = forwards

    @property
    def body(self) -> torch.nn.Module:
        """The part that turns tokens into the states that the head multiplies."""
        return getattr(self.model, self._body_name)

    @property
    def forwards(self) -> CapturedLm | None:
        """The argument of `replay`."""
        return self._captured

    @property
    def captured(self) -> bool:
        return self._captured is not None

    def refresh(self) -> None:
        """Take over weights that were written in place."""
        if self._captured is not None:
            self._captured.body.refresh()
            self._captured.head.refresh()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self._probe.hidden_size

    @property
    def vocab_size(self) -> int:
        """The width of the logits, which may exceed the tokenizer's size."""
        return self._probe.vocab_size

    @property
    def output_weight(self) -> torch.Tensor:
        """[V, H], what the head multiplies its states by. Of a quantised head its numbers, made
        when they are first asked for."""
        head = self.model.get_output_embeddings()
        if self._table is None and not has_numbers(getattr(head, "weight", None)):
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            self._table = effective_weight(head, like=like)
        return head.weight if self._table is None else self._table

    def pass_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        has_table = has_numbers(getattr(self.model.get_output_embeddings(), "weight", None))
        return weight_bytes([self.model], *([self.output_weight] if has_table else []))

    @property
    def num_positions(self) -> int:
        """Positions that the model is made for."""
        return getattr(self.config, "max_position_embeddings", NO_POSITIONS)

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, whose states depend on that text alone."""
        limit = self.rope_limit
        return self.num_positions if limit is None else min(self.num_positions, limit.positions)

    def check_length(self, length: int, what: str) -> None:
        """Raises `UserError` where texts of `length` tokens, by the option or argument `what`,
        would depend on their batch."""
        if self.rope_limit is not None:
            self.rope_limit.check(length, self.name, what)

    def new_pool(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedPool:
        """Zeroed keys and values for `num_blocks * block_size` positions of every layer."""
        return PagedPool.of_layers(
            self._probe.layers, num_blocks, block_size, device or self.device, dtype or self.dtype
        )

    def new_states(self, num_slots: int) -> StateSlots | None:
        """States of `num_slots` texts; None for a model without layers that have one."""
        return self.state_layers.new_slots(num_slots, self.device) if self.state_layers else None

    def paged(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        taps: Sequence[int] = (),
    ) -> States:
        """A ragged pass, input_ids and positions [1, T]; `context` owns keys, values
        and causality."""
        if taps:
            check_taps(taps, self.num_layers)
        if self._captured is None or torch.is_grad_enabled():
            return _joined(self.own_paged(input_ids, positions, context, taps), taps)
        found = self._captured.body(input_ids, positions, attention_context=context)
        joined = torch.cat([found[1 + tap] for tap in taps], dim=-1) if taps else None
        return States(found[0], joined, None if taps else found)

    def own_paged(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        taps: Sequence[int],
    ) -> dict[int, torch.Tensor]:
        """The model's own forward with `context`: the states asked for, and `FINAL`."""
        # A 4-D mask stops transformers from building one of its own; the context ignores it.
        with self.state_layers.reading(context), running(context, positions):
            return self._body(
                taps,
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=self._unused_mask,
                attention_context=context,
            )

    def full(
        self,
        input_ids: torch.Tensor,
        taps: Sequence[int] = (),
        segments: torch.Tensor | None = None,
    ) -> States:
        """Whole right-padded texts [B, L], causal; several in a row where `segments` [B, L] says
        so. What stands at padding is meaningless, and no real token sees it."""
        check_taps(taps, self.num_layers)
        # A server's pass and a trainer's give the same bits: both come through here.
        with faster_linears(input_ids.device, self.dtype):
            if segments is None:
                return _joined(self._body(taps, input_ids=input_ids), taps)
            # Through our own attention rather than transformers' mask of packed texts: not every
            # model passes its positions there.
            return _joined(
                self.own_paged(input_ids, positions_of(segments), PackedPass(segments), taps), taps
            )

    def _body(self, taps: Sequence[int], **inputs: Any) -> dict[int, torch.Tensor]:
        with captured(self.layers, taps) as states:
            states[FINAL] = self.body(**inputs, use_cache=False).last_hidden_state
        return states

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> logits [..., V] in the model's dtype, with the model's own scales and soft
        caps."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        forwards = None if torch.is_grad_enabled() else self._captured
        logits = self.own_head(rows) if forwards is None else forwards.head(rows)
        return logits.view(*hidden.shape[:-1], -1)

    def own_head(self, rows: torch.Tensor) -> torch.Tensor:
        """The model's own forward in `head`, [1, R, H] -> [1, R, V]."""
        return self._head(inputs_embeds=rows).logits

    @torch.no_grad()
    def part_of_head(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """`head` of the tokens `ids` [n] alone, [R, H] -> [R, n + 1], whose last column is room for
        the caller. None where the head is no plain product, or not all of it is here."""
        plain = self.model.get_output_embeddings()
        names = [name for name, one in self._head._modules.items() if one is plain]
        is_here = type(plain) is torch.nn.Linear and not plain.weight.is_meta
        if not is_here or not names or isinstance(plain.weight, DTensor):
            return None
        part = torch.nn.Linear(plain.in_features, len(ids) + 1, plain.bias is not None, "meta")
        for name, whole in plain.named_parameters():
            rows = torch.cat([whole[ids], torch.zeros_like(whole[:1])])
            setattr(part, name, torch.nn.Parameter(rows, requires_grad=False))
        head = copy.copy(self._head)
        head._modules = {**self._head._modules, names[0]: part}

        def narrow(states: torch.Tensor) -> torch.Tensor:
            return head(inputs_embeds=states[None]).logits[0]

        generator = torch.Generator().manual_seed(0)
        states = torch.randn(8, plain.in_features, generator=generator).to(plain.weight)
        wanted = self.own_head(states[None])[0][:, ids].float()
        try:
            found = narrow(states)[:, :-1].float()
        except (IndexError, RuntimeError):  # it names ids that are not there
            return None
        near = 1e-2 * wanted.abs().median().item()
        is_same = found.shape == wanted.shape and torch.allclose(found, wanted, 1e-2, near)
        return torch.no_grad()(narrow) if is_same else None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(ids)


def _joined(states: dict[int, torch.Tensor], taps: Sequence[int]) -> States:
    return States(states[FINAL], torch.cat([states[tap] for tap in taps], dim=-1) if taps else None)


def end_ids(
    generation: GenerationConfig | None, config: PreTrainedConfig | None
) -> tuple[int, ...]:
    """Chat models name all of theirs in the generation config, and only one in the config."""
    ids = None if generation is None else generation.eos_token_id
    if ids is None and config is not None:
        ids = getattr(config.get_text_config(), "eos_token_id", None)
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


class _GivenStates(torch.nn.Module):
    """Stands where the body was: returns its input embeddings as the last hidden state."""

    def __init__(self, body: torch.nn.Module):
        super().__init__()
        self.__dict__["_body"] = body  # no module of this one, which has no weights

    def __getattr__(self, name: str) -> Any:
        # Falcon-H1 scales its logits by a number that its body has.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_body"], name)

    @property
    def decoder(self) -> _GivenStates:
        return self  # OPT's head model calls `self.model.decoder`

    def forward(
        self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **unused: Any
    ) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """A body's output in which every optional entry is None, whichever the head model reads."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _head_alone(model: PreTrainedModel, body_name: str) -> PreTrainedModel:
    """The same model object but for its body, sharing every parameter of the head.

    Running the model's own forward over given states is the only way to its logits that needs no
    list of the scales, soft caps and biases that families put around their head.
    """
    head = copy.copy(model)
    head._modules = {**model._modules, body_name: _GivenStates(getattr(model, body_name))}
    return head


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight that is spread over processes, put together again on each; any other as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
