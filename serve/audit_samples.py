"""Sampled continuations of a few contexts, asked of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.serve.audit_client import AuditClient, Completion
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_law import Text

CONTEXT_TOKENS = 16
CONTROL_TEMPERATURE = 1.3


class Samples(NamedTuple):
    context: Text
    tokens: list[list[int]]


def make_context(client: AuditClient, config: AuditConfig, index: int) -> Text:
    """Token ids that the server itself wrote after the prompt, twice over: a repetition lets n-gram drafters draft, too."""
    body = {"max_tokens": CONTEXT_TOKENS, "temperature": 1.0, "ignore_eos": True}
    written = client.complete(config.prompt, **body, **_seed(config, index)).tokens
    if len(written) != CONTEXT_TOKENS:
        raise UserError(
            f"the server wrote {len(written)} of {CONTEXT_TOKENS} tokens after {config.prompt!r}; give another prompt"
        )
    return (*written, *written, *written[: CONTEXT_TOKENS // 4])


def draw_samples(client: AuditClient, config: AuditConfig, contexts: Sequence[Text]) -> Iterator[Samples]:
    body = {"max_tokens": config.length, "temperature": config.temperature, "ignore_eos": True}
    body |= {"top_k": config.top_k} if config.top_k else {}
    body |= {"top_p": config.top_p} if config.top_p < 1 else {}
    body |= {"min_p": config.min_p} if config.min_p else {}
    each = -(-config.samples // (len(contexts) * config.choices))
    progress = Progress("samples", total=each * len(contexts), unit="requests")
    for number, context in enumerate(contexts):
        tokens: list[list[int]] = []
        for begin in range(0, each, config.concurrency):
            numbers = range(begin, min(begin + config.concurrency, each))

            def ask(index: int, number: int = number, context: Text = context) -> list[Completion]:
                # vLLM gives choice i the seed plus i: requests in a row would repeat one another's choices.
                seed = _seed(config, 1_000_003 * (number + 1) + index * config.choices)
                return client.choices(list(context), n=config.choices, **body, **seed)

            tokens += [choice.tokens for choices in client.map(ask, numbers) for choice in choices]
            progress.update(number * each + begin + len(numbers))
        yield Samples(context, tokens)
    progress.close()


def _seed(config: AuditConfig, index: int) -> dict[str, int]:
    return {"seed": config.seed + index} if config.seeded else {}


def prefixes(samples: Sequence[Samples]) -> Iterator[Text]:
    for context, continuations in samples:
        for tokens in continuations:
            for place in range(len(tokens)):
                yield (*context, *tokens[:place])


def followers(samples: Sequence[Samples], place: int) -> dict[Text, Counter[int]]:
    """The tokens at `place` of the continuations, by all that stands before it."""
    found: dict[Text, Counter[int]] = {}
    for context, continuations in samples:
        for tokens in continuations:
            if place < len(tokens):
                found.setdefault((*context, *tokens[:place]), Counter())[tokens[place]] += 1
    return found
