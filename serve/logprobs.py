"""Log-probabilities of emitted tokens: the target's own, at temperature 1 and before filters."""

from __future__ import annotations

import torch

from draftsmith.serve.request import TokenLogprob


def token_logprobs(logits: torch.Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Raw logits [n, V] of the positions of `tokens` [n]."""
    logprobs = torch.log_softmax(logits[: len(tokens)], dim=-1)
    emitted = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    likeliest = torch.topk(logprobs, min(alternatives, logprobs.shape[-1]), dim=-1)
    tops = [list(zip(ids, values)) for ids, values in zip(likeliest.indices.tolist(), likeliest.values.tolist())]
    return [TokenLogprob(*parts) for parts in zip(tokens, emitted, tops)]
