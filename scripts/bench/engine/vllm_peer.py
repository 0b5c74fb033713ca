"""vLLM's offline engine for scripts/bench_generate, run by vLLM's own Python: one JSON job per line on
stdin ({"prompts": [[ids, temperature, seed]], "max_tokens"}), one JSON result per line on stdout. The
seeds are left out: drawing each row by a stream of its own would cost vLLM time."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    target, batch, longest, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    llm = LLM(target, dtype=dtype, max_num_seqs=batch, max_model_len=longest)
    print(json.dumps({"ready": True}), flush=True)
    for text in sys.stdin:
        job = json.loads(text)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _, _ in job["prompts"]]
        params = [
            SamplingParams(temperature=temperature, max_tokens=job["max_tokens"], detokenize=False)
            for _, temperature, _ in job["prompts"]
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
        print(json.dumps({"num_tokens": num_tokens}), flush=True)


if __name__ == "__main__":
    main()
