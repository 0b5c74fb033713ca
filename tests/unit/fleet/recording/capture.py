"""Real calls of vLLM on the CPU, stored for tests that run without it: `calls.npz`.

    DRAFTSMITH_VLLM_PYTHON tests/unit/fleet/recording/capture.py

Six requests in turns of three, two drafted tokens per step: greedy and sampled ones, a seed, a
penalty, a stop token, a prompt in two chunks.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

OUT = Path(__file__).with_name("calls.npz")
VOCAB = 48
PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_words", "structured_outputs", "thinking_token_budget", "repetition_detection",
    "eos_token_id", "stop_token_ids", "extra_args",
)  # fmt: skip
REQUESTS = [
    (list(range(3, 9)), {"temperature": 0.0, "max_tokens": 9}),
    (list(range(9, 40)), {"temperature": 1.0, "max_tokens": 12}),
    ([7, 7], {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}),
    ([11, 12, 13], {"temperature": 1.0, "seed": 5, "max_tokens": 6}),
    ([21, 5], {"temperature": 1.0, "presence_penalty": 0.7, "max_tokens": 6}),
    ([30, 31, 32, 33], {"temperature": 1.0, "stop_token_ids": list(range(1, VOCAB, 3)), "max_tokens": 20}),
]  # fmt: skip


def save_models(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.save_pretrained(folder / "target")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    made.save_pretrained(folder / "draft")


class Capture:
    """In place of a rejection sampler, and of two calls of the worker."""

    def __init__(self, worker: Any):
        self.steps: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.runner = worker.model_runner
        self.inner = self.runner.rejection_sampler
        self.execute, self.sample = worker.execute_model, worker.sample_tokens
        self.runner.rejection_sampler = self
        worker.execute_model, worker.sample_tokens = self.execute_model, self.sample_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute_model(self, schedule: Any) -> Any:
        cached = schedule.scheduled_cached_reqs
        new = [
            {
                "req_id": one.req_id,
                "prompt_token_ids": one.prompt_token_ids,
                "params": {name: getattr(one.sampling_params, name) for name in PARAMS},
            }
            for one in schedule.scheduled_new_reqs
        ]
        resumed = {one: cached.all_token_ids[one] for one in cached.resumed_req_ids}
        finished = sorted(schedule.finished_req_ids)
        self.steps.append({"new": new, "finished": finished, "resumed": resumed})
        return self.execute(schedule)

    def __call__(self, metadata: Any, draft_probs: Any, logits: Any, sampling: Any) -> Any:
        step, number = self.steps[-1], len(self.steps) - 1
        step["req_ids"] = list(self.runner.input_batch.req_ids)
        step["counts"] = list(metadata.num_draft_tokens)
        for name in ("draft_token_ids", "target_logits_indices", "bonus_logits_indices"):
            self.arrays[f"{number}/{name}"] = getattr(metadata, name).numpy().copy()
        self.arrays[f"{number}/logits"] = logits.float().numpy().copy()
        if draft_probs is not None:
            self.arrays[f"{number}/draft_probs"] = draft_probs.numpy().copy()
        return self.inner(metadata, draft_probs, logits, sampling)

    def sample_tokens(self, grammar: Any) -> Any:
        output = self.sample(grammar)
        self.steps[-1]["output_ids"] = list(output.req_ids)
        self.steps[-1]["sampled"] = [
            [int(token) for token in own] for own in output.sampled_token_ids
        ]
        return output


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_PLUGINS"] = ""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        llm = LLM(
            str(folder / "target"), skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
            max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24, disable_log_stats=True,
            speculative_config={
                "method": "draft_model", "model": str(folder / "draft"),
                "num_speculative_tokens": 2, "draft_sample_method": "probabilistic",
            },
        )  # fmt: skip
        worker = llm.llm_engine.model_executor.driver_worker.worker
        capture = Capture(worker)
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS],
            [SamplingParams(detokenize=False, **options) for _, options in REQUESTS],
        )
    texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in answers]
    described = json.dumps({"steps": capture.steps, "texts": texts}).encode()
    np.savez_compressed(OUT, steps=np.frombuffer(described, np.uint8), **capture.arrays)
    print(f"{OUT}: {len(capture.steps)} steps, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
