"""Base of feature heads (eagle3, mtp): unrolling for training, drafting over the paged pool.

A head reads, at position t, the target's state there and the token at t + 1, and predicts the token
at t + 2. Drafting further, it takes its own previous output for the state. H hidden width, B rows,
K draft positions, T ragged positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import linear
from transformers import LlamaConfig

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.compiled.capture import NUM_TOKENS
from draftsmith.drafters.compiled.captured import (
    PIECES,
    Replay,
    attempt,
    compare,
    log_level,
    pass_over,
    steps_for,
)
from draftsmith.drafters.draft_shape import WindowedContext, Windows
from draftsmith.drafters.init_from_target import LayeredDraft
from draftsmith.drafters.interface import ForwardCapturable, UnrollBatch, UnrolledStep
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.trees.growth import TreeLoop
from draftsmith.drafters.unrolled.unroll import UnrollPass
from draftsmith.drafters.weights import ReadBytes, weight_bytes
from draftsmith.kernels.attention.paged import PagedPass


class CapturedHead(NamedTuple):
    # (embeds, hidden [1, T, H], positions [1, T]) -> (next_hidden, head_input), each [1, T, H]
    step: Replay
    fuse: Replay  # [T, n * H_t] -> [T, H]
    logits: Replay  # [T, H] -> [T, Vd]

    def refresh(self) -> None:
        """Take over weights that were written in place."""
        self.step.refresh()
        self.fuse.refresh()
        self.logits.refresh()


class FeatureHead(LayeredDraft, ForwardCapturable, TreeLoop):
    family: str
    taps: tuple[int, ...]
    config: LlamaConfig
    windows: Windows = ()
    ahead = 2  # the state at position t predicts the token at t + 2
    _captured: CapturedHead | None = None

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., n * H_t] true states -> [..., H]."""
        return taps.to(self.dtype)

    @abstractmethod
    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> HeadStep:
        """embeds and hidden [b, t, H], positions [b, t] or [1, t]."""

    def windowed(self, context: AttentionContext) -> AttentionContext:
        return WindowedContext(context, self.windows) if self.windows else context

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(proposal=0, token=weight_bytes([self], self.head_weight()))

    def capture_forward(self) -> None:
        """Nothing, with the reason in the log, where a part fails or is not exact."""
        weight = self.head_weight()
        steps = steps_for(weight.device, weight.dtype)
        if self._captured is None and steps is not None:
            self._captured = attempt(self.family, lambda: _capture(self, steps), log_level(steps))

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> raw [T, Vd]; drafting only, as are `fused` and `read_ragged`."""
        return (
            head_input @ self.head_weight().T
            if self._captured is None
            else self._captured.logits(head_input)
        )

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        if self._captured is None:
            return self.fuse(taps)
        return self._captured.fuse(taps.to(self.head_weight().dtype))  # captured of its own type

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        # the last column gets a wrong one, and nothing to predict
        next_ids = torch.roll(batch.input_ids, -1, dims=1)
        embeds = self.embed(next_ids)
        hidden = self.fuse(batch.taps)
        positions, has_next = batch.positions, batch.has_next  # column t reads the token at t + 1
        # No chain that drafts a token which counts is longer, so before these columns only true
        # states matter.
        first = max(0, batch.first - batch.num_steps)
        context = UnrollPass(batch.segments, first=first)
        for depth in range(batch.num_steps):
            step = self.step(embeds, hidden, positions, context)
            missing = batch.input_ids.shape[1] - step.head_input.shape[1]
            drafted = torch.nn.functional.pad(step.head_input, (0, 0, missing, 0))
            yield UnrolledStep(
                hidden=drafted, valid=has_next & (batch.positions >= depth), offset=2
            )
            context.next_step()
            hidden = torch.nn.functional.pad(step.next_hidden[:, :-1], (0, 0, 1, 0))
            if depth == 0:
                embeds, hidden, positions = (
                    embeds[:, first:],
                    hidden[:, first:],
                    positions[:, first:],
                )

    def refresh(self) -> None:
        if self._captured is not None:
            self._captured.refresh()

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """Drafted positions were written from the head's own states; they are read again with the
        target's."""
        return last

    def read_committed(
        self, tokens: torch.Tensor, taps: torch.Tensor | None, context: PagedPass
    ) -> HeadStep:
        assert taps is not None
        return self.read_ragged(self.embed(tokens), self.fused(taps), context)

    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        return self.read_ragged(self.embed(tokens), hidden, context)

    def read_ragged(
        self, embeds: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        """[T, H] -> [T, H]."""
        inputs = embeds[None], hidden[None], context.positions[None]
        if self._captured is None:
            step = self.step(*inputs, context)
        else:
            step = HeadStep(*self._captured.step(*inputs, attention_context=context))
        return HeadStep(step.next_hidden[0], step.head_input[0])


def _capture(head: FeatureHead, steps: Literal["cpu", "triton"]) -> CapturedHead:
    states = _states(head, NUM_TOKENS)
    positions = torch.arange(NUM_TOKENS, device=states.device)[None]
    captured = CapturedHead(
        step=Replay(
            lambda embeds, hidden, places, context: tuple(
                head.step(embeds, hidden, places, context)
            ),
            [states[None], states[None], positions],
            steps=steps,
        ),
        fuse=Replay(lambda taps, context: head.fuse(taps), [_taps(head, NUM_TOKENS)], steps=steps),
        logits=Replay(
            lambda rows, context: linear(rows, head.head_weight()), [states], steps=steps
        ),
    )
    if steps == "triton":
        torch.cuda.empty_cache()  # where weights lay before they were joined
    _check(head, captured)
    return captured


def _states(head: FeatureHead, count: int) -> torch.Tensor:
    weight = head.head_weight()
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, weight.shape[1], generator=generator).to(weight)


def _taps(head: FeatureHead, count: int) -> torch.Tensor:
    return _states(head, count).repeat(1, len(head.taps))


@torch.no_grad()
def _check(head: FeatureHead, captured: CapturedHead) -> None:
    weight = head.head_weight()
    pools = [head.new_pool(2, sum(PIECES), weight.device, weight.dtype) for _ in range(2)]
    begin = 0
    for count in PIECES:
        taps, embeds = _taps(head, count), _states(head, count).flip(0)
        positions = torch.arange(begin, begin + count, device=weight.device)
        contexts: list[AttentionContext] = [pass_over(pool, positions) for pool in pools]
        hidden = head.fuse(taps)
        compare(captured.fuse(taps), hidden)
        expected = head.step(embeds[None], hidden[None], positions[None], contexts[0])
        found = captured.step(
            embeds[None], hidden[None], positions[None], attention_context=contexts[1]
        )
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
        compare(captured.logits(expected.head_input[0]), linear(expected.head_input[0], weight))
        begin += count
    for one, other in zip((*pools[1].keys, *pools[1].values), (*pools[0].keys, *pools[0].values)):
        compare(one, other)
