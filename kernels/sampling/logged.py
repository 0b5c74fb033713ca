"""Distributions as records hold them: the likeliest tokens, the drafted token's own logprob and the
norm under a temperature. n positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.kernels.dispatch import Reading, pins, sent, sent_tensor
from draftsmith.kernels.sampling import logged_compiled
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.record import ProbArrays


def prob_arrays(
    logits: torch.Tensor, tokens: Sequence[int], temperatures: Sequence[float] | None = None
) -> ProbArrays:
    """Arrays of logits [n, V] with the logprobs of the drafted `tokens` and, for p, the norms under
    `temperatures`."""
    made = logged_compiled.prob_arrays(logits, tokens, temperatures, TOP)
    return _unpacked(_packed(logits, tokens, temperatures).cpu()) if made is None else made


def late_arrays(
    logits: torch.Tensor,
    tokens: Sequence[int] | torch.Tensor,
    temperatures: Sequence[float] | None = None,
) -> Callable[[], ProbArrays]:
    """The same, made on the device of the logits. They are on the host when they are asked for, if
    a round lies between."""
    host = on_its_way(_packed(logits, tokens, temperatures))
    return lambda: _unpacked(host())


def on_its_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A tensor's copy on the host, begun now and waited for when it is asked for."""
    return Reading(tensor).wait if pins(tensor.device) else lambda: tensor


def _packed(
    logits: torch.Tensor,
    tokens: Sequence[int] | torch.Tensor,
    temperatures: Sequence[float] | None,
) -> torch.Tensor:
    """[n, 2 k + 3] float32: ids, whose bits stay as they are, logprobs, tail, norm, and the drafted
    token's logprob."""
    ids, logprobs, tail = top_probs(logits, TOP)
    known = tokens if isinstance(tokens, torch.Tensor) else sent(logits.device, tokens)[0]
    chosen = known.long().clamp(min=0)[:, None]
    # Apart from the likeliest token by as much as their logits, without a second logsumexp.
    gap = logits.gather(-1, chosen).float() - logits.gather(-1, ids[:, :1]).float()
    logprobs, tail = logprobs.float(), tail.float()
    norms = torch.zeros_like(tail)
    if temperatures is not None and not all(one in (0.0, 1.0) for one in temperatures):
        norms = _log_norms(logits, temperatures)
    rest = torch.stack([tail, norms, logprobs[:, 0] + gap[:, 0]], dim=1)
    return torch.cat([ids.int().view(torch.float32), logprobs, rest], dim=1)


def _unpacked(packed: torch.Tensor) -> ProbArrays:
    values = packed.numpy()
    k = (values.shape[1] - 3) // 2
    ids = np.ascontiguousarray(values[:, :k]).view(np.int32)
    return ProbArrays(ids, values[:, k : 2 * k], *values[:, 2 * k :].T)


def _log_norms(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """[n] log sum_v exp(logprob_v / temperature); of a temperature of 0 at temperature 1, which
    gives 0 up to rounding."""
    host = torch.tensor([one or 1.0 for one in temperatures], dtype=torch.float32)
    scale = sent_tensor(logits.device, host)[:, None]
    return torch.logsumexp(torch.log_softmax(logits.float(), dim=-1) / scale, dim=-1)
