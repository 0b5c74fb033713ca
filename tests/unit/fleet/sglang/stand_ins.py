"""Stand-ins of the parts of SGLang 0.5.23 that the plugin meets, with its own names. The optional
check of `test_source.py` holds these names against SGLang's source where that is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

VOCAB = 48
# Fields of EagleVerifyInput, SamplingParams and Req that are read.
VERIFY_INPUT = (
    "draft_token", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
    "draft_token_num", "draft_probs",
)  # fmt: skip
SAMPLING_PARAMS = {
    "max_new_tokens": 99, "stop_token_ids": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": 1 << 30, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "min_new_tokens": 0, "beam_width": None, "json_schema": None,
    "regex": None, "ebnf": None, "structural_tag": None, "ignore_eos": False, "logit_bias": None,
    "sampling_seed": None, "custom_params": None, "watermark": None,
}  # fmt: skip
REQ = (
    "rid", "origin_input_ids", "output_ids", "sampling_params", "input_embeds", "lora_id",
    "eos_token_ids", "multimodal_inputs", "finished",
)  # fmt: skip


class Request(SimpleNamespace):
    def __init__(self, rid: str, prompt: list[int], **params: Any):
        super().__init__(
            rid=rid, origin_input_ids=prompt, output_ids=[], eos_token_ids={0}, lora_id=None,
            input_embeds=None, multimodal_inputs=None, is_over=False,
            sampling_params=SimpleNamespace(**{**SAMPLING_PARAMS, **params}),
        )  # fmt: skip

    def finished(self) -> bool:
        return self.is_over


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The call of the released source, verifying greedily: down the tree along the target's
    likeliest tokens. Its logits are overwritten, as penalties are added in place."""
    logits, n = logits_output.next_token_logits, verify_input.draft_token_num
    best = logits.argmax(-1).int()
    kept = []
    for first in range(0, len(best), n):
        row, path = first // n, [first]
        child = int(verify_input.retrieve_next_token[row, 0])
        while child >= 0:
            if int(verify_input.draft_token[first + child]) == int(best[path[-1]]):
                path.append(first + child)
                child = int(verify_input.retrieve_next_token[row, child])
            else:
                child = int(verify_input.retrieve_next_sibling[row, child])
        kept.append(path)
    logits.zero_()
    index = torch.full((len(kept), verify_input.max_tree_depth), -1, dtype=torch.int32)
    for row, path in enumerate(kept):
        index[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return best, torch.tensor([len(path) for path in kept], dtype=torch.int32), index


class Engine:
    """Rounds of a batch with trees and logits of a test."""

    def __init__(self, hook: Any):
        self.hook = hook
        self.texts: dict[str, list[int]] = {}
        self.logits: list[torch.Tensor] = []

    def prefill(self, req: Request, token: int) -> None:
        self.texts[req.rid] = [*req.origin_input_ids, token]
        req.output_ids.append(token)

    def round(
        self, requests: list[Request], trees: list[list[tuple[int, int]]], *, seed: int = 0
    ) -> list[list[int]]:
        """`trees` are (parent, token) of each node behind the root. Returns the committed
        tokens."""
        n = 1 + max(map(len, trees))
        first = torch.full((len(trees), n), -1)
        sibling = torch.full((len(trees), n), -1)
        tokens = torch.zeros(len(trees), n, dtype=torch.long)
        for row, (req, tree) in enumerate(zip(requests, trees)):
            tokens[row, 0] = self.texts[req.rid][-1]
            for node in range(len(tree), 0, -1):
                parent, token = tree[node - 1]
                tokens[row, node] = token
                sibling[row, node], first[row, parent] = first[row, parent].item(), node
        logits = rows(seed, len(trees) * n)
        self.logits.append(logits.clone())
        verify_input = SimpleNamespace(
            draft_token=tokens.flatten(), retrieve_next_token=first, retrieve_next_sibling=sibling,
            retrieve_index=torch.arange(len(trees) * n).view(-1, n), draft_token_num=n,
            draft_probs=None, max_tree_depth=n,
        )  # fmt: skip
        batch = SimpleNamespace(
            reqs=requests, forward_mode=SimpleNamespace(is_idle=lambda: False),
            seq_lens=torch.tensor([len(self.texts[req.rid]) - 1 for req in requests]),
        )  # fmt: skip
        output = SimpleNamespace(next_token_logits=logits)
        predict, lengths, index = self.hook(eagle_sample, verify_input, batch, output, None)
        committed = [
            predict[row[:length].long()].tolist() for row, length in zip(index, lengths.tolist())
        ]
        for req, new in zip(requests, committed):
            self.texts[req.rid] += new
            req.output_ids += new
        return committed


def rows(seed: int, count: int) -> torch.Tensor:
    """Logits [count, VOCAB] of a round with that seed."""
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))
