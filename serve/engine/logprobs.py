"""Log-probabilities of emitted tokens: the target's own, at temperature 1 and before filters."""

from __future__ import annotations

import torch

from draftsmith.serve.engine.runner import prompt_positions
from draftsmith.serve.engine.scheduler import Row
from draftsmith.serve.requests.request import TokenLogprob


def token_logprobs(logits: torch.Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Raw logits [n, V] of the positions of `tokens` [n]."""
    logprobs = torch.log_softmax(logits[: len(tokens)], dim=-1)
    emitted = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    likeliest = torch.topk(logprobs, min(alternatives, logprobs.shape[-1]), dim=-1)
    tops = [list(zip(ids, values)) for ids, values in zip(likeliest.indices.tolist(), likeliest.values.tolist())]
    return [TokenLogprob(*parts) for parts in zip(tokens, emitted, tops)]


def add_prompt_logprobs(row: Row, logits: torch.Tensor) -> None:
    """What a pass tells of the row's prompt; `logits` [n, V] are those behind the row's `prompt_positions`."""
    request, positions = row.request, prompt_positions(row)
    alternatives = request.params.prompt_logprobs
    if alternatives is None or not positions:
        return
    tokens = request.tokens[positions.start + 1 : positions.stop + 1]
    request.prompt_logprobs += token_logprobs(logits, tokens, alternatives)
