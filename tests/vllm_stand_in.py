"""Stand-in for vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import torch

from draftsmith.drafters.target.target import Target


class StandIn:
    """Answers as vLLM does: nothing for the first token, then K tokens and the prompt's own."""

    def __init__(self, target: Target, most: int = 300, max_logprobs: int = 300):
        self.target, self.most, self.max_logprobs = target, most, max_logprobs
        self.asked: list[list[int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path != "/v1/completions":
            return httpx.Response(404, json={"detail": "Not Found"})
        asked = json.loads(request.content)
        assert asked["model"] == "served" and asked["max_tokens"] == 1
        if (top := asked["prompt_logprobs"]) > self.max_logprobs:
            says = f"Requested prompt logprobs of {top}, which is greater than max allowed"
            return httpx.Response(400, json={"error": {"message": says}})
        self.asked.append(asked["prompt"])
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": self._of(asked)}]})

    def _of(self, asked: dict[str, Any]) -> list[dict[str, Any] | None]:
        ids = torch.tensor([asked["prompt"]])
        _, hidden = self.target.states(ids, torch.ones_like(ids), ())
        logprobs = self.target.head(hidden)[0].log_softmax(dim=-1)
        entries: list[dict[str, Any] | None] = [None]
        for row, token in zip(logprobs[:-1], asked["prompt"][1:], strict=True):
            chosen = row.topk(min(self.most, asked["prompt_logprobs"], len(row))).indices.tolist()
            # The prompt's own token comes first.
            entries.append(
                {str(one): {"logprob": float(row[one])} for one in dict.fromkeys([token, *chosen])}
            )
        return entries
