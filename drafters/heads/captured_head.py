"""The parts of a feature head that drafting runs again and again, as captured forwards."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.compiled.capture import NUM_TOKENS
from draftsmith.drafters.compiled.captured import (
    PIECES,
    attempt,
    compare,
    log_level,
    pass_over,
    steps_for,
)
from draftsmith.drafters.compiled.replay import Replay
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.pool import PagedPool


class HeadForward(Protocol):
    """The parts of a feature head that are captured."""

    family: str
    taps: tuple[int, ...]

    def fuse(self, taps: torch.Tensor) -> torch.Tensor: ...

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> HeadStep: ...

    def head_weight(self) -> torch.Tensor: ...

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool: ...


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


def capture_head(head: HeadForward, impl: str = "auto") -> CapturedHead | None:
    """Capture the head's parts, on CUDA with fewer launches. None, with the reason in the log,
    where that fails or is not exact, and where nothing is captured."""
    weight = head.head_weight()
    steps = steps_for(weight.device, weight.dtype, impl)
    if steps is None:
        return None
    return attempt(head.family, lambda: _capture(head, steps), log_level(steps))


def _capture(head: HeadForward, steps: Literal["cpu", "triton"]) -> CapturedHead:
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


def _states(head: HeadForward, count: int) -> torch.Tensor:
    weight = head.head_weight()
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, weight.shape[1], generator=generator).to(weight)


def _taps(head: HeadForward, count: int) -> torch.Tensor:
    return _states(head, count).repeat(1, len(head.taps))


@torch.no_grad()
def _check(head: HeadForward, captured: CapturedHead) -> None:
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
