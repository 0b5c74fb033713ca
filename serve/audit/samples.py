"""Sampled continuations of a few contexts, requested from a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.prompts.suites import is_given, read_suite
from draftsmith.serve.audit.client import AuditClient, AuditCompletion
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import Path, Text

CONTEXT_TOKENS = 16


MARGIN = 1  # the bonus token of a round
UNKNOWN_K = 8  # where the server does not report how many tokens it drafts


class Samples(NamedTuple):
    context: Text
    tokens: list[list[int]]
    reports: Sequence[dict[str, Any] | None] = ()  # of each continuation's rounds


def make_contexts(client: AuditClient, config: AuditConfig) -> list[Text]:
    """A context behind the prompt each, or, of a suite, behind chats that are spread evenly over
    it."""
    if not is_given(config):
        return [make_context(client, config, index) for index in range(config.contexts)]
    questions = read_suite(config).questions
    chosen = (questions[at * len(questions) // config.contexts] for at in range(config.contexts))
    return [
        make_context(client, config, index, client.tokens_of(question.fields))
        for index, question in enumerate(chosen)
    ]


def make_context(
    client: AuditClient, config: AuditConfig, index: int, chat: Sequence[int] = ()
) -> Text:
    """Token ids that the server generated after the prompt, twice over: a repetition lets n-gram
    drafters draft, too. Behind the ids of a chat, if one is given."""
    body = {"max_tokens": CONTEXT_TOKENS, "temperature": 1.0, "ignore_eos": True}
    prompt = list(chat) or config.prompt
    written = client.complete(prompt, **body, **_seed(config, index)).tokens
    if len(written) != CONTEXT_TOKENS:
        raise UserError(
            f"the server generated {len(written)} of {CONTEXT_TOKENS} tokens after "
            f"{config.prompt!r}; give another prompt"
        )
    return (*chat, *written, *written, *written[: CONTEXT_TOKENS // 4])


def draw_samples(
    client: AuditClient, config: AuditConfig, contexts: Sequence[Text]
) -> Iterator[Samples]:
    """Samples of `config.length` tokens and as many more as a round may draft: a round drafts no
    more tokens, and a tree has no more nodes, than are left to generate."""
    asked = (
        config.length
        + max(UNKNOWN_K if config.k is None else config.k, client.draft_tokens)
        + MARGIN
    )
    body: dict[str, Any] = {
        "max_tokens": asked,
        "temperature": config.temperature,
        "ignore_eos": True,
    }
    body |= {"top_k": config.top_k} if config.top_k else {}
    body |= {"top_p": config.top_p} if config.top_p < 1 else {}
    body |= {"min_p": config.min_p} if config.min_p else {}
    each = -(-config.samples // (len(contexts) * config.choices))
    progress = Progress("samples", total=each * len(contexts), unit="requests")
    for number, context in enumerate(contexts):
        answers: list[AuditCompletion] = []
        for begin in range(0, each, config.concurrency):
            numbers = range(begin, min(begin + config.concurrency, each))

            def ask(
                index: int, number: int = number, context: Text = context
            ) -> list[AuditCompletion]:
                # vLLM gives choice i the seed plus i: requests in a row would repeat one another's
                # choices.
                seed = _seed(config, 1_000_003 * (number + 1) + index * config.choices)
                return client.choices(list(context), n=config.choices, **body, **seed)

            answers += [choice for choices in client.map(ask, numbers) for choice in choices]
            progress.update(number * each + begin + len(numbers))
        yield Samples(
            context, [answer.tokens for answer in answers], [answer.report for answer in answers]
        )
    progress.close()


def _seed(config: AuditConfig, index: int) -> dict[str, int]:
    return {"seed": config.seed + index} if config.seeded else {}


def paths(samples: Sequence[Samples]) -> Iterator[Path]:
    for context, continuations, _ in samples:
        for tokens in continuations:
            if tokens:
                yield Path((*context, *tokens[:-1]), len(context))


def followers(
    samples: Sequence[Samples], included: Callable[[int, int, int], bool] | None = None
) -> dict[Text, Counter[int]]:
    """Counts of the tokens that followed each text; `included(context, continuation, index)`
    selects among them, all by default."""
    found: dict[Text, Counter[int]] = {}
    for number, (context, continuations, _) in enumerate(samples):
        for index, tokens in enumerate(continuations):
            for length, token in enumerate(tokens):
                if included is None or included(number, index, length):
                    found.setdefault((*context, *tokens[:length]), Counter())[token] += 1
    return found
