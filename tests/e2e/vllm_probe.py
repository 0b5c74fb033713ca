"""Run by the second engine's Python, not by pytest: `python vllm_probe.py JOB.json` writes what
vLLM generated and accepted.

Job: {"model", "prompts": [[ids]], "max_tokens", "max_model_len", "speculative": null or vLLM's
speculative config, "hf_overrides": null or keys of the model's config, "temperature": 0 where it is
absent, "additional": null or vLLM's additional config, "out"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    engine = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=8,
        speculative_config=job["speculative"],
        disable_log_stats=False,
        seed=0,
        hf_overrides=job.get("hf_overrides"),
        additional_config=job.get("additional") or {},
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    finished = engine.generate(
        prompts,
        SamplingParams(temperature=job.get("temperature", 0.0), max_tokens=job["max_tokens"]),
    )
    metrics = {
        metric.name: metric
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }
    result = {"tokens": [list(request.outputs[0].token_ids) for request in finished]}
    if metrics:
        result |= {
            "rounds": metrics["vllm:spec_decode_num_drafts"].value,
            "offered": metrics["vllm:spec_decode_num_draft_tokens"].value,
            "accepted": metrics["vllm:spec_decode_num_accepted_tokens"].value,
            "accepted_by_position": metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
        }
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
