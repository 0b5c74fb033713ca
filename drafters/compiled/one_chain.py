"""The drafting of chains as one call: the kernels of a draft's parts, token by token without Python
between them.

Legend: T tokens of a pass, M most of them, H hidden width, Vd draft vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.chain import draw_on
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.autoregressive.state import ReadsCommitted
from draftsmith.drafters.compiled.one_call import OneCall
from draftsmith.drafters.compiled.replay import Replay
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged_compiled import MOST_QUERIES
from draftsmith.kernels.call_list import CallList
from draftsmith.kernels.draft_chain import Chain, ChainPart, DraftRound, NoRow, draft, draw_address
from draftsmith.kernels.products.few_rows import MOST_ROWS


class ChainParts(NamedTuple):
    """Captured parts of a draft."""

    step: Replay  # -> among others states [T, H] that the next step reads, and the head
    inputs: Sequence[str]  # of the step: "ids" or "embeds", "hidden", "positions"
    head: Replay  # states [T, H] -> logits [T, Vd]
    embed: Replay | None = None  # ids [T] -> [T, H]
    fuse: Replay | None = None  # taps -> states [T, H]
    outputs: tuple[int, int] = (0, 1)  # which of the step's these are


class _Part(NamedTuple):
    call: OneCall
    inputs: Sequence[str]  # names of what it reads
    output: str


class OneChain:
    """Chains of a draft; made by `one_chain`."""

    def __init__(self, parts: dict[str, _Part], outputs: tuple[int, int], draw: int, ahead: int):
        self._parts, self._step, head = parts, parts["step"].call, parts["head"].call
        self._dtype, self._vocab = head.dtype, head.width
        self._listed: list[CallList] = []
        self._held: dict[str, ChainPart] = {}
        # One thread and one draft of those that share it at a time; a round leaves nothing in it.
        self._lock = threading.Lock()
        self._memory: dict[str, torch.Tensor] = {}
        self._chain = Chain(
            draw=draw,
            next=self._step.outputs[outputs[0]].number,
            head_input=self._step.outputs[outputs[1]].number,
            width=self._step.width * self._dtype.itemsize,
            draft_vocab=self._vocab,
            logits_width=self._dtype.itemsize,
            ahead=ahead,
            most_tokens=MOST_ROWS,
            most_in_row=min(MOST_ROWS, _most_in_row(self._step)),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, which are taken at the first draft and kept."""
        buffers = {id(one): one.nbytes for one in self._buffers("meta").values()}
        return sum(buffers.values())

    def share_buffers(self, other: OneChain) -> bool:
        """Draft in the buffers of `other`; before the first draft. False where they are not such
        as these."""
        assert not self._listed, "calls that are listed have the addresses of other buffers"
        if self._shapes != other._shapes:
            return False
        self._lock, self._memory = other._lock, other._memory
        return True

    @property
    def _shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (one.shape, one.dtype) for name, one in self._buffers("meta").items()}

    def _allocate(self) -> None:
        """Once it is needed: with a large vocabulary logits and their copies are most of it."""
        if not self._memory:
            self._memory.update(self._buffers("cpu"))
        for name in (
            "ids",
            "positions",
            "hidden",
            "stepped",
            "heads",
            "logits",
            "wide",
            "processed",
        ):
            setattr(self._chain, name, self._memory[name].data_ptr())

    def _buffers(self, device: str) -> dict[str, torch.Tensor]:
        width, whole = self._step.width, {"dtype": torch.int64, "device": device}
        numbers = {name: torch.zeros(MOST_ROWS, **whole) for name in ("ids", "positions")}
        parts = self._parts.values()
        sizes = {part.output: part.call.states[0] * part.call.width for part in parts}
        sizes |= {"hidden": width, "heads": width}
        # Not zeros: a round touches as many rows as it has.
        memory = numbers | {
            name: torch.empty(MOST_ROWS, size, dtype=self._dtype, device=device)
            for name, size in sizes.items()
        }
        narrow = self._dtype != torch.float32
        memory["processed"] = torch.empty(MOST_ROWS, self._vocab, device=device)
        memory["wide"] = torch.empty_like(memory["processed"]) if narrow else memory["logits"]
        most = max(part.call.scratch_bytes for part in parts)
        memory["scratch"] = torch.empty(MOST_ROWS * most, dtype=torch.uint8, device=device)
        return memory

    def draft(self, drafter: ReadsCommitted, inputs: DraftInputs, sampler: DraftSampler) -> bool:
        """Read what `drafter`, whose chain it is, has not, and draft as many tokens as each row
        may, into `sampler`. False, and nothing done, where the kernels do not take the round."""
        if inputs.adjust is not None or sampler.confidence is not None:
            return False
        if sampler.vocab_map is None and self._vocab > sampler.shape[2]:
            return False
        pool = inputs.own_pool
        layers = self._step.layers(pool)
        if layers is None or not self._lock.acquire(blocking=False):
            return False
        try:
            depth = self._drawn(inputs, sampler, layers, pool.block_size)
            if depth is None:
                return False
            if depth < sampler.depth:
                states = [self._memory[name].clone() for name in ("logits", "hidden", "positions")]
        finally:
            self._lock.release()
        sampler.all_have_mass = sampler.best is None and depth == sampler.depth
        if depth < sampler.depth:
            draw_on(drafter, inputs, sampler, depth, *states)
        return True

    def _drawn(
        self, inputs: DraftInputs, sampler: DraftSampler, layers: torch.Tensor, block_size: int
    ) -> int | None:
        taps = None if inputs.taps is None else inputs.taps.to(self._dtype).contiguous()
        tables, seeds, rows = inputs.block_tables.contiguous(), inputs.seeds, inputs.sampling
        seeds, best, q = seeds.contiguous(), sampler.best, sampler.logits
        tensors = (
            inputs.tokens, inputs.starts, inputs.lengths, inputs.num_draft, tables, seeds, taps,
            rows.temperature, rows.top_k, rows.top_p, rows.min_p,
            sampler.vocab_map, layers, sampler.tokens, sampler.lengths, best, q,
        )  # fmt: skip
        pointers = [None if one is None else one.data_ptr() for one in tensors]
        width = 0 if taps is None else taps.shape[1] * taps.itemsize
        round = DraftRound(*pointers, width, *sampler.shape, tables.shape[1], block_size)
        if not self._listed:
            self._allocate()
        self._list_calls()
        try:
            return draft(self._chain, round)
        except NoRow:
            self._step.reach(int((inputs.starts + inputs.lengths).max()) + sampler.depth)
            if not self._list_calls():
                raise
        return draft(self._chain, round)

    def _list_calls(self) -> bool:
        """Take over lists that a refresh or a longer table has made anew; False where none was."""
        listed = [part.call.calls for part in self._parts.values()]
        if listed == self._listed:
            return False
        for (name, part), calls in zip(self._parts.items(), listed):
            given = [part.inputs[number] for number in part.call.given if number is not None]
            places = [self._memory.get(one) for one in ("scratch", part.output, *given)]
            bases = [0, *(0 if one is None else one.data_ptr() for one in places)]
            self._held[name] = ChainPart.of(calls, bases)
            setattr(self._chain, name, self._held[name])
            if "taps" in given:
                self._chain.taps_base = len(bases) - len(given) + given.index("taps")
        self._listed = listed
        return True


def _most_in_row(step: OneCall) -> int:
    """Tokens of a row that its attention takes."""
    return MOST_QUERIES // step.most_group


def one_chain(parts: ChainParts, ahead: int) -> OneChain | None:
    """Chains of a draft whose state at position t predicts the token at t + `ahead`. None where a
    part is not made of kernels alone, and where more heads share a key than attention takes."""
    draw = draw_address()
    found = {
        "embed": (parts.embed, ("ids",), "embeds"),
        "fuse": (parts.fuse, ("taps",), "hidden"),
        "step": (parts.step, parts.inputs, "stepped"),
        "head": (parts.head, ("heads",), "logits"),
    }
    made: dict[str, _Part] = {}
    for name, (replay, inputs, output) in found.items():
        if replay is None:
            continue
        if replay.calls is None or None in replay.calls.given:
            return None
        made[name] = _Part(replay.calls, inputs, output)
    step = made["step"].call
    alike = {part.call.dtype for part in made.values()} == {step.dtype}
    alike &= "fuse" not in made or made["fuse"].call.width == step.width
    if draw is None or not alike or any(step.outputs[index].part for index in parts.outputs):
        return None
    if _most_in_row(step) == 0:
        return None
    return OneChain(made, parts.outputs, draw, ahead)
