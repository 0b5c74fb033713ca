"""`draftsmith generate`: joins the dataset of answers to the engine, which writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from draftsmith.distill.config import GenerateConfig
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.distill.generate.writers import Answers, Asked
    from draftsmith.drafters.target.target import Target
    from draftsmith.serve.engine.engine import Engine
    from draftsmith.serve.requests.request import Request


def run(config: GenerateConfig) -> int:
    from draftsmith.distill.generate.command import run as generate

    return generate(config, answers_of)


def answers_of(target: Target, config: GenerateConfig, longest: int) -> Answers:
    """Answers of an engine of its own, without a draft.

    Args:
        longest: most tokens of a prompt and its answer. Raises `UserError` where the memory for
            keys and values does not hold them.
    """
    from draftsmith.serve.config import EngineConfig
    from draftsmith.serve.engine.build import build_engine

    options = EngineConfig(max_batch=config.batch, max_length=longest, memory_gib=config.memory_gib)
    engine = build_engine(target, None, options)
    if engine.max_length < longest:
        raise UserError(
            f"the longest prompt and its answer are {longest} tokens and the memory for keys and "
            f"values holds {engine.max_length}; give more --memory-gib, or fewer --max-tokens"
        )
    return partial(answered, engine, config)


def answered(
    engine: Engine, config: GenerateConfig, asked: Iterable[Asked]
) -> Iterator[tuple[int, list[int]]]:
    """(number, answer) in the order in which answers end. An answer follows from its prompt,
    temperature and seed alone, up to rounding: every draw is a function of the seed and the
    position."""
    from draftsmith.serve.requests.request import FinishReason, RequestOptions
    from draftsmith.serve.sampling.params import SamplingParams

    numbers: dict[Request, int] = {}

    def requests() -> Iterator[Request]:
        for number, one in enumerate(asked):
            params = SamplingParams(
                temperature=one.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                max_tokens=config.max_tokens,
                seed=one.seed,
            )
            options = RequestOptions(text=False, learn=False)
            request = engine.inputs.request(one.ids, params, options=options)
            numbers[request] = number
            yield request

    for request in engine.complete(requests()):
        number = numbers.pop(request)
        if request.finish_reason is FinishReason.ERROR:
            raise UserError(
                f"the target {config.target!r} has no distribution after {request.num_tokens} "
                f"tokens of an answer (NaN); look for the cause with draftsmith doctor"
            )
        yield number, request.output
