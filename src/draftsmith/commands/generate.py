"""`draftsmith generate`: joins the dataset of answers to the engine that writes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from draftsmith.config import Limits, option
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.config_checks import check_generate
from draftsmith.drafters.config import Pair
from draftsmith.errors import UserError
from draftsmith.progress import loading
from draftsmith.prompts.sources import check_source
from draftsmith.serve.config import DEFAULT_K, LookupOptions, ServeConfig
from draftsmith.serve.config_checks import check as check_served
from draftsmith.serve.control.control import MAX_K

if TYPE_CHECKING:
    from draftsmith.distill.generate.prompts import Prompt
    from draftsmith.distill.generate.writers import Texts
    from draftsmith.drafters.interface import ServingDrafter
    from draftsmith.drafters.target.target import Target
    from draftsmith.serve.engine.engine import EngineCore
    from draftsmith.serve.requests.request import Request


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(GenerateOptions, LookupOptions, Pair):
    """Options of the dataset, and of the drafts that write it sooner."""

    k: int | None = option(
        None, f"draft tokens per round [default: {DEFAULT_K}]", limits=Limits(1, MAX_K, "[]")
    )

    def drafting(self) -> str:
        """Name of an option that drafts; "" where none is given."""
        given = {"draft": self.draft, "suffix": self.suffix}
        return next((name for name, value in given.items() if value), "")

    def served(self, longest: int | None = None) -> ServeConfig:
        """Options of a server that would write the same answers.

        Args:
            longest: most tokens of a prompt and its answer; None: not known yet.
        """
        return ServeConfig(
            **{field.name: getattr(self, field.name) for field in fields(Pair)},
            k=str(self.k or DEFAULT_K),
            suffix=self.suffix,
            max_batch=self.batch,
            max_length=longest,
            memory_gib=self.memory_gib,
        )


def run(config: GenerateConfig) -> int:
    check(config)
    check_source(config.prompts)
    with loading():  # late: it imports torch, which takes seconds
        from draftsmith.distill.generate.command import run as generate

    return generate(config, answers_of)


def check(config: GenerateConfig) -> None:
    """Refuses options that do not go together, before anything is loaded."""
    check_generate(config)
    _check_written_here(config)
    check_served(config.served())


def _check_written_here(config: GenerateConfig) -> None:
    """Refuse drafting options where nothing is drafted by them."""
    drafting = config.drafting()
    elsewhere = "--url" if config.url is not None else "--keep-answers"
    if drafting and (config.url is not None or config.keep_answers):
        raise UserError(
            f"{drafting} is given with {elsewhere}, and no answer is written here; leave it out"
        )
    if config.k is not None and not drafting:
        raise UserError(
            f"k is {config.k} and nothing drafts; give --draft or --suffix too, or leave it out"
        )


def answers_of(target: Target, longest: int, config: GenerateConfig) -> EngineAnswers:
    """Answers of an engine of its own, drafted where the options say so.

    Args:
        longest: most tokens of a prompt and its answer. Raises `UserError` where the memory for
            keys and values does not hold them.
    """
    from draftsmith.serve.load import load_engine

    engine, draft, _ = load_engine(config.served(longest), target)
    if engine.max_length < longest:
        raise UserError(
            f"the longest prompt and its answer are {longest} tokens and the memory for keys and "
            f"values holds {engine.max_length}; give more --memory-gib, or fewer --max-tokens"
        )
    revision = None if config.draft is None else draft_revision(draft.drafter)
    return EngineAnswers(engine, config, {"drafts": drafts_of(config, revision)}, revision)


def draft_revision(drafter: ServingDrafter | None) -> str:
    """Digest of a trained draft's weights, as a target's."""
    from draftsmith.drafters.target.target import revision_of
    from draftsmith.drafters.text.text_first import TextFirst

    model: Any = drafter.model if isinstance(drafter, TextFirst) else drafter
    return revision_of(model)


def drafts_of(config: GenerateConfig, revision: str | None) -> dict[str, Any] | None:
    """Entry of the provenance: what the draws of sampled answers depend on. Greedy answers draw
    nothing, so that they may be continued with any draft or none."""
    from draftsmith.distill.generate.prompts import hottest

    if not config.drafting() or hottest(config) == 0:
        return None
    drafts: dict[str, Any] = {"k": config.k or DEFAULT_K}
    drafts |= {"suffix": True} if config.suffix else {}
    return drafts if revision is None else drafts | {"draft": config.draft, "revision": revision}


@dataclass
class EngineAnswers:
    """`distill/generate/writers.py: AnswerWriter` of answers that an engine writes."""

    engine: EngineCore
    config: GenerateConfig
    provenance: dict[str, Any]
    revision: str | None = None  # of the trained draft
    wall_s: float = 0.0  # in which all answers so far were written

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Texts:
        """An answer follows from its prompt, temperature, seed and, where it is sampled, the draft
        and its k alone, up to rounding: every draw is a function of the seed and the position, and
        every round of where the last one ended."""
        from draftsmith.distill.generate.writers import continued
        from draftsmith.serve.requests.request import FinishReason

        numbers: dict[Request, int] = {}

        def requests() -> Iterator[Request]:
            for number, asked in enumerate(zip(prompts, seeds, strict=True)):
                request = self._request(*asked)
                numbers[request] = number
                yield request

        begun_s = time.monotonic()
        try:
            for request in self.engine.complete(requests()):
                number = numbers.pop(request)
                if request.finish_reason is FinishReason.ERROR:
                    raise UserError(
                        f"the target {self.config.target!r} has no distribution after "
                        f"{request.num_tokens} tokens of an answer (NaN); look for the cause with "
                        "draftsmith doctor"
                    )
                yield number, continued(prompts[number], request.output)
        finally:
            self.wall_s += time.monotonic() - begun_s

    def _request(self, prompt: Prompt, seed: int) -> Request:
        from draftsmith.distill.generate.writers import seed_of, temperature_of
        from draftsmith.serve.requests.request import RequestOptions
        from draftsmith.serve.sampling.params import SamplingParams

        # A draft may have been trained on answers to the same prompts and seeds. Were their draws
        # made again, what it drafts would depend on them, and the answers would be biased.
        if self.revision is not None:
            seed = seed_of(seed, int(self.revision, 16))
        params = SamplingParams(
            temperature=temperature_of(prompt, self.config),
            top_k=self.config.top_k,
            top_p=self.config.top_p,
            max_tokens=self.config.max_tokens,
            seed=seed,
            stop_token_ids=prompt.ends,
        )
        return self.engine.inputs.request(prompt.ids, params, options=RequestOptions(text=False))

    def report(self) -> str:
        stats = self.engine.stats
        if not stats.num_generation_tokens:
            return ""
        speed = (
            f"{stats.num_generation_tokens} tokens written at "
            f"{stats.num_generation_tokens / self.wall_s:.0f} tok/s"
        )
        tau = stats.acceptance.tau
        return speed if tau is None else f"{speed}, tau {tau:.2f} of the rounds that drafted"
