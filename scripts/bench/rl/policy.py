"""A policy that is trained by group-relative policy gradient towards a reward that anyone can check:
the share of capital letters among the letters of an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.prompts.corpus import CORPORA, held_out
from draftsmith.train.data.batches import mask_of, padded
from scripts.demo.traffic import cut

PROMPT_TOKENS = 24


@dataclass(frozen=True)
class Rollout:
    prompt: list[int]
    answer: list[int]


class Prompts:
    """Beginnings of code that neither target nor draft was trained on."""

    def __init__(self, tokenizer: Any, *, seed: int):
        self.tokenizer, self.draws = tokenizer, random.Random(seed)
        self.texts = [one.text for one in CORPORA["stdlib:code"]() if held_out(one)]

    def take(self, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < count:
            prompt = cut(self.tokenizer, self.draws.choice(self.texts), PROMPT_TOKENS, self.draws)
            if len(prompt) == PROMPT_TOKENS:
                found.append(prompt)
        return found


def reward(text: str) -> float:
    letters = [one for one in text if one.isalpha()]
    return sum(one.isupper() for one in letters) / max(1, len(letters))


class Policy:
    def __init__(self, folder: Path, *, lr: float):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [reward(self.tokenizer.decode(one.answer)) for one in rollouts]

    def update(self, rollouts: Sequence[Rollout], rewards: Sequence[float], group: int) -> float:
        """One step on rollouts of the policy as it is; `group` neighbours have the same prompt.
        Returns the mean entropy of the answers' distributions, in nats."""
        values = torch.tensor(rewards).view(-1, group)
        spread = values.std(dim=1, keepdim=True)
        advantages = ((values - values.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()
        rows = [torch.tensor(one.prompt + one.answer) for one in rollouts]
        ids, mask = padded(rows), mask_of(rows)
        logprobs = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        place = torch.arange(1, ids.shape[1])[None]
        starts = torch.tensor([len(one.prompt) for one in rollouts])[:, None]
        counts = (mask[:, 1:].bool() & (place >= starts)).float()
        loss = -(advantages[:, None] * chosen * counts).sum() / counts.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return float((entropy * counts).sum() / counts.sum())
