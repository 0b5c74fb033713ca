"""Warm-up before traffic, with a capturer of the test's own: afterwards no round captures anything,
and nobody can tell that there was one."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.autoregressive import draft_sampler
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.trees import candidates
from draftsmith.kernels.cuda_graphs import CountedCapturer, GraphRoom
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import verify
from draftsmith.serve.engine.build import build_engine, most_drafted
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.graphs import PassGraphs
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.warm_up import rehearse, warm_up
from tests.device_traffic import StandInCapturer

MAX_BATCH, K = 4, 3


def make_engine(
    target: Target, *, captured: bool = True, max_batch: int = MAX_BATCH, **options: Any
) -> EngineCore:
    """As on a device with graphs, but for the capturer."""
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0).to(torch.float32)
    config = EngineConfig(
        compile="off", max_batch=max_batch, k=K, max_length=96, num_blocks=40, seed=7, **options
    )
    engine = build_engine(target, drafter, config, draft_version="0")
    if captured:
        max_blocks = engine.tables.host.shape[1]
        engine.draft_graphs = CountedCapturer(StandInCapturer())
        drafter.capture(GraphRoom(engine.proposer.pool, max_batch, max_blocks, engine.draft_graphs))
        engine.runner.graphs = PassGraphs(
            target,
            engine.runner.pool,
            max_batch=max_batch,
            max_blocks=max_blocks,
            capturer=StandInCapturer(),
            per_row=1 + most_drafted(engine.proposer, config),
            taps=engine.proposer.taps,
            has_trees=False,
        )
    return engine


def answers(engine: EngineCore, seed: int = 0, count: int = 12) -> list[list[int]]:
    """Of requests that come and go in a random order."""
    rng, requests = random.Random(seed), []
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
    for _ in range(count):
        prompt = [rng.randrange(3, 200) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            **rng.choice(kinds), max_tokens=rng.randint(1, 24), k=rng.choice([None, None, 0, 1])
        )
        requests.append(engine.submit(prompt, params))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


# Requests of each kind that has draws, graphs or launches of its own, or of several by turns.
OTHERS: dict[str, list[dict[str, Any]]] = {
    "top-k": [{"temperature": 1.0, "top_k": 5}],
    "large top-k": [{"temperature": 0.9, "top_k": 100}],
    "min-p": [{"temperature": 1.0, "min_p": 0.05}],
    "all filters": [{"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02}],
    "penalties": [{"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4}],
    "greedy penalties": [{"temperature": 0.0, "presence_penalty": 0.5}],
    "bias": [{"temperature": 1.0, "logit_bias": ((7, 2.0),), "top_k": 9}],
    "mixed": [{"temperature": 0.0}, {"temperature": 1.0}],
    "mixed filters": [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}],
    "logprobs": [{"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 1}],
}


class Variants:
    """What a GPU would compile or capture for: draws and filters, by what chooses their kernels,
    and graphs."""

    def __init__(self, engine: EngineCore, monkeypatch: pytest.MonkeyPatch):
        self.engine, self.seen = engine, set[tuple[Any, ...]]()
        for module, name in ((draft_sampler, "draw"), (verify, "process"), (candidates, "process")):
            monkeypatch.setattr(module, name, self._noting(name, getattr(module, name)))
        for name in ("verify_block", "verify_tree"):
            monkeypatch.setattr(verify, name, self._noting(name, getattr(verify, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows = next((one for one in args if isinstance(one, SamplingRows)), None)
            passes = None if rows is None else rows.passes
            kind = passes and (passes.all_greedy, passes.greedy, passes.filtered)
            # Triton compiles anew for a size of one.
            self.seen.add((name, kind, len(logits) == 1))
            return function(logits, *args, **kwargs)

        return noted

    def count(self) -> tuple[int, int, int]:
        assert self.engine.runner.graphs is not None and self.engine.draft_graphs is not None
        graphs = self.engine.runner.graphs.num_graphs, self.engine.draft_graphs.num_graphs
        return (len(self.seen), *graphs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="chains"),
        pytest.param({"tree": "sampled:2x2"}, id="sampled trees", marks=pytest.mark.long),
        pytest.param(
            {"tree": "dynamic:nodes=6,depth=3,width=2"}, id="dynamic trees", marks=pytest.mark.long
        ),
    ],
)
def test_no_kind_of_request_meets_what_the_warm_up_has_not(target, options, monkeypatch, capsys):
    """Nor can anybody tell that there was one: the same answers for the engine's seed, the same
    counters, no block in use."""
    expected = None if options else answers(make_engine(target, captured=False))
    engine = make_engine(target, **options)
    control, before = engine.scheduler.control, copy.deepcopy(vars(engine.stats))
    variants = Variants(engine, monkeypatch)
    rehearse(engine)
    assert vars(engine.stats) == before
    assert engine.scheduler.control is control and not engine.busy
    assert engine.scheduler.blocks.usage == 0
    warmed, seen = variants.count(), set(variants.seen)
    graphs, drafts = engine.runner.graphs, engine.draft_graphs
    assert not graphs.broken and not drafts.broken and graphs.num_graphs == len(graphs.shapes)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    counts = f"CUDA graphs: {graphs.num_graphs} target, {drafts.num_graphs} draft"
    assert line.startswith("warm up: ") and line.endswith(f", {counts}]")
    given = answers(engine)
    assert options or given == expected
    for name, kinds in OTHERS.items():
        # Two kinds share rounds with others; single requests meet sizes of one.
        for count in (3,) if options and len(kinds) == 1 else (1, 3):
            requests = [
                engine.submit([5, 60, 7, 8 + row], SamplingParams(**values, max_tokens=12))
                for row, values in zip(range(count), itertools.cycle(kinds))
            ]
            while engine.busy:
                engine.step()
            assert all(len(request.output) == 12 or request.finished for request in requests)
            assert variants.seen <= seen, name
            assert variants.count() == warmed, name


def test_a_round_that_fails_is_told_and_the_rest_goes_on(target, caplog, monkeypatch):
    engine = make_engine(target, max_batch=1)
    step, failures = engine.step, [RuntimeError("no room\nfor it")]

    def failing() -> bool:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(engine, "step", failing)
    rehearse(engine)
    assert "a round of the warm-up failed (no room)" in caplog.text
    assert engine.draft_graphs.num_graphs > 0 and not engine.busy


@pytest.mark.parametrize("kind, option, expected", [
    ("cpu", True, 0), ("cuda", False, 0), ("cuda", True, 1),
])  # fmt: skip
def test_only_on_a_gpu_and_where_it_is_not_switched_off(kind, option, expected, monkeypatch):
    class Stub:
        config = EngineConfig(warm_up=option)

        class target:
            device = torch.device(kind)

    calls = []
    monkeypatch.setattr("draftsmith.serve.warm_up.rehearse", calls.append)
    warm_up(Stub)
    assert len(calls) == expected
