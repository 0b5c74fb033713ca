"""transformers' own generation for scripts/bench_serving: one JSON job a line on stdin, one JSON
result a line on stdout.

A job: {"mode": "plain" | "assisted" | "lookup", "prompts": [text], "temperature", "max_tokens",
"streams", "k", "seed"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, dtype=dtype).eval()


class Generator:
    def __init__(self, target: str, draft: str, dtype: torch.dtype):
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            target, trust_remote_code=False, padding_side="left"
        )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.target = load(target, dtype)
        self.assistant = load(draft, dtype) if draft else None

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """All prompts once, `streams` in a batch; assisted generation and prompt lookup exist for
        one at a time only."""
        torch.manual_seed(job["seed"])
        batch = job["streams"] if job["mode"] == "plain" else 1
        begun_s, num_tokens = perf_counter(), 0
        for begin in range(0, len(job["prompts"]), batch):
            num_tokens += self.generate(job["prompts"][begin : begin + batch], job)
        return {"num_tokens": num_tokens, "wall_s": perf_counter() - begun_s}

    def generate(self, prompts: Sequence[str], job: dict[str, Any]) -> int:
        inputs = self.tokenizer(
            list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False
        )
        count = job["max_tokens"]
        sampling: dict[str, Any] = {"do_sample": False}
        if job["temperature"] > 0:
            sampling = {
                "do_sample": True,
                "temperature": job["temperature"],
                "top_k": 0,
                "top_p": 1.0,
            }
        with torch.inference_mode():
            output = self.target.generate(
                **inputs, **sampling, **self.speculation(job), max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        return (output.shape[1] - inputs["input_ids"].shape[1]) * len(prompts)

    def speculation(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["mode"] == "assisted":
            config = model_with_depth(self.assistant, job["k"])
            return {"assistant_model": config}
        return (
            {"prompt_lookup_num_tokens": job["k"], "max_matching_ngram_size": 4}
            if job["mode"] == "lookup"
            else {}
        )


def model_with_depth(assistant: PreTrainedModel | None, k: int) -> PreTrainedModel:
    assert assistant is not None, "assisted generation was asked for without a draft"
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    generator = Generator(arguments.target, arguments.draft, getattr(torch, arguments.dtype))
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(generator.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
