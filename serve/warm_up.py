"""Warm-up of an engine on a GPU: what its first rounds would capture and compile, before any
request waits for it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from draftsmith.drafters.autoregressive.padded_round import WIDTHS
from draftsmith.errors import first_line
from draftsmith.kernels.cuda_graphs import sizes_up_to
from draftsmith.kernels.dispatch import pins
from draftsmith.progress import Progress
from draftsmith.serve.control.control import Control
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import FinishReason, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams

log = logging.getLogger(__name__)

SHORT_PROMPT = 128  # tokens
ROUNDS = 3  # of a batch: the prompt, and two that draft, the second behind drafts of its own
# Kinds of requests whose draft steps and samplers get graphs and compiled kernels.
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
)
# What is worked out beside the draws, without graphs.
BESIDE = SamplingParams(
    temperature=0.9,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    prompt_logprobs=1,
)
# Not recorded, not remembered by drafts from text, and no prefix of a client's prompt.
UNSEEN = RequestOptions(text=False, learn=False, cache_salt="warm-up")


def warm_up(engine: EngineCore) -> None:
    """Capture and compile, on the caller's thread, before the engine has one. Nothing on a CPU, nor
    where the option is off."""
    if engine.config.warm_up and pins(engine.target.device):
        rehearse(engine)


def rehearse(engine: EngineCore) -> None:
    """`warm_up` on any device. The engine's counters and controls do not see it."""
    steps = [*_captures(engine), *_batches(engine)]
    progress = Progress("warm up", total=len(steps), unit="shapes")
    with unseen(engine):
        for done, step in enumerate(steps, start=1):
            step()
            progress.update(done, note=_held(engine))
    progress.close()


def _captures(engine: EngineCore) -> list[Callable[[], object]]:
    """The target's graphs; the largest come first."""
    graphs = engine.runner.graphs
    return [] if graphs is None else [partial(graphs.prepare, shape) for shape in graphs.shapes]


def _batches(engine: EngineCore) -> list[Callable[[], object]]:
    """Rounds of as many rows, and of as many unread tokens in each, as draft steps have graphs for,
    and passes of a prompt alone, whose contexts attention cuts or does not. A draft reads a prompt
    with the token behind it."""
    config = engine.config
    longest = min(config.max_round_tokens, engine.max_length - 1)
    # The short one first: behind the longest the prefix cache would hold nearly all of it.
    prompts = sorted({min(SHORT_PROMPT, longest), longest})
    sizes = sizes_up_to(min(config.max_batch, config.max_queue))
    return [
        *(partial(_rounds, engine, [KINDS[0]], length=length) for length in prompts),
        *(
            partial(_rounds, engine, [kind] * size, length=min(width - 1, longest))
            for size in reversed(sizes)
            for kind in KINDS
            for width in WIDTHS
        ),
        *(
            partial(_rounds, engine, [kind] * size, length=min(2, longest))
            for kind in (BESIDE, replace(BESIDE, top_k=0, min_p=0.0))
            for size in {1, sizes[-1]}
        ),
        # Greedy rows beside others, which draft or do not.
        *(
            partial(_rounds, engine, [KINDS[0], replace(kind, k=k)], length=min(2, longest))
            for kind in KINDS[1:]
            for k in (None, 0)
            if sizes[-1] > 1
        ),
    ]


def _rounds(engine: EngineCore, kinds: Sequence[SamplingParams], length: int = 1) -> None:
    """A few rounds of a request of each of `kinds`, which are then ended. A seed makes them draft
    their k whatever is accepted, and takes none from the engine's own."""
    room = engine.max_length - length
    most = max(1, min(room, ROUNDS * (1 + engine.max_draft_tokens)))
    requests = [
        engine.submit(
            [0] * length, replace(kind, seed=0, ignore_eos=True, max_tokens=most), options=UNSEEN
        )
        for kind in kinds
    ]
    try:
        for _ in range(ROUNDS):
            engine.step()
    except RuntimeError as error:
        # A server would end such requests and go on.
        log.warning("a round of the warm-up failed (%s)", first_line(error))
    finally:
        for request in requests:
            engine.cancel(request, FinishReason.ABORT)


@contextmanager
def unseen(engine: EngineCore) -> Iterator[None]:
    """Leaves counters and controls as they are: these rounds compile, so their times say
    nothing."""
    scheduler, stats = engine.scheduler, vars(engine.stats)
    control, preemptions = scheduler.control, scheduler.num_preemptions
    before = copy.deepcopy(stats)
    scheduler.control = Control()
    try:
        yield
    finally:
        scheduler.control, scheduler.num_preemptions = control, preemptions
        stats.update(before)


def _held(engine: EngineCore) -> str:
    graphs, drafts = engine.runner.graphs, engine.draft_graphs
    target = 0 if graphs is None else graphs.num_graphs
    return f"CUDA graphs: {target} target, {0 if drafts is None else drafts.num_graphs} draft"
