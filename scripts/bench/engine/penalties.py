"""CPU time that penalties add to a round of 64 requests; `scripts/bench_round --penalties`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from time import thread_time

import torch

from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.state import SamplingState
from scripts.bench.markdown_table import header, line

ASKED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)
WARM_UP = 5


def measure(vocab_size: int, penalised: int, options: argparse.Namespace) -> dict[str, float]:
    """Median ms of a round's adjustments, of which to follow the texts by one token is a part, and
    of a copy of its logits, which is another."""
    generator = random.Random(0)
    rows, length = range(options.rows), options.text
    states = [_state(vocab_size, length) if row < penalised else None for row in rows]
    texts = [[generator.randrange(vocab_size) for _ in range(length)] for _ in rows]
    logits = torch.randn(options.rows, vocab_size)
    spent: dict[str, list[float]] = {"follow": [], "adjust": [], "copy": []}
    for _ in range(options.rounds + WARM_UP):
        begun_s = thread_time()
        adjust = Adjustments.of(states, texts)
        followed_s = thread_time()
        if adjust is not None:
            adjust.apply(logits, rows, [[] for _ in rows])
        ended_s = thread_time()
        logits.clone()
        spent["follow"].append(followed_s - begun_s)
        spent["adjust"].append(ended_s - begun_s)
        spent["copy"].append(thread_time() - ended_s)
        for text in texts:
            text.append(generator.randrange(vocab_size))
    return {name: 1e3 * statistics.median(times[WARM_UP:]) for name, times in spent.items()}


def _state(vocab_size: int, length: int) -> SamplingState:
    device = torch.device("cpu")
    return SamplingState(
        ASKED, num_prompt=length // 2, vocab_size=vocab_size, eos_token_ids=(0,), device=device
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--penalised", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--text", type=int, default=2000, help="tokens of each text")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 32000])
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    torch.set_num_threads(1)
    found = []
    print(
        "\n".join(header("vocabulary", "penalised", "adjust, ms", "follow", "copy of the logits"))
    )
    with torch.inference_mode():
        for vocab_size in options.vocabulary:
            for penalised in options.penalised:
                row = measure(vocab_size, penalised, options)
                found.append({"vocabulary": vocab_size, "penalised": penalised} | row)
                cells = [f"{row[name]:.3f}" for name in ("adjust", "follow", "copy")]
                print(line(vocab_size, penalised, *cells), flush=True)
    print(json.dumps({"torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
