"""The 64 likeliest of each row, found on an accelerator and copied to the host without waiting.

On a CPU raw logits are copied instead, which costs the engine's thread a hundredth. n rows, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

# Rows of a step that are reduced; the requests behind them are text only in this step.
MOST_ROWS = 512
# Rows at once: 32 of 152,000 in float32 are 19 MB.
CHUNK = 32

Arrays = Callable[[], list[np.ndarray]]


def reduce(
    rows: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    temperatures: Sequence[float],
) -> Arrays:
    """Ids [n, 64], logprobs [n, 64] and tail, log norm, logprob of the drafted token [n, 3], once
    they are asked for.

    Args:
        rows: logits [m, V] at a choice [m] of the n positions.
        tokens: [n] drafted ids.
    """
    from draftsmith.kernels.sampling.top_tokens import top_probs

    normed = any(temperature not in (0.0, 1.0) for temperature in temperatures)
    spread = torch.tensor([t or 1.0 for t in temperatures], device=tokens.device)
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for at in torch.arange(len(tokens), device=tokens.device).split(CHUNK):
        logits = rows(at).float()
        top = top_probs(logits)
        drafted = tokens[at].clamp(min=0)[:, None].long()
        gap = logits.gather(-1, drafted) - logits.gather(-1, top.ids[:, :1])
        norm = torch.zeros_like(top.tail)
        if normed:
            logprobs = torch.log_softmax(logits, dim=-1)
            norm = torch.logsumexp(logprobs / spread[at, None], dim=-1)
            norm = torch.where(spread[at] == 1, 0.0, norm)
        rest = torch.stack([top.tail, norm, top.logprobs[:, 0] + gap[:, 0]], dim=1)
        parts.append((top.ids.int(), top.logprobs, rest))
    return to_host([torch.cat(columns) for columns in zip(*parts)])


def to_host(tensors: Sequence[torch.Tensor]) -> Arrays:
    """Copies begun now and waited for when they are asked for."""
    if not tensors[0].is_cuda:
        return lambda: [tensor.numpy() for tensor in tensors]
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def arrays() -> list[np.ndarray]:
        event.synchronize()
        return [copy.numpy() for copy in copies]

    return arrays
