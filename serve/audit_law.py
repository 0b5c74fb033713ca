"""Laws that samples are held against, and the transform that makes any sample uniform if it follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.drafters.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.progress import Progress
from draftsmith.serve.audit_client import MAX_LOGPROBS, AuditClient
from draftsmith.serve.audit_config import AuditConfig

BATCH = 200  # laws asked for between two progress lines

Text = tuple[int, ...]  # token ids of context and continuation so far


@dataclass(frozen=True)
class CoarseLaw:
    """The probabilities of some tokens, likeliest first; all others are one outcome, the tail."""

    ids: list[int]
    probs: list[float]
    top_gap: float  # logprob distance of the two likeliest tokens before any filter; 0 for one token

    @property
    def tail(self) -> float:
        return max(0.0, 1.0 - sum(self.probs))

    def transform(self, token: int, fraction: float) -> float | None:
        """Where `token` falls in the law's cumulative distribution, `fraction` of the way through its own step; uniform on
        [0, 1] for a sample of the law. None for a token that the law forbids."""
        below = 0.0
        for candidate, prob in zip(self.ids, self.probs):
            if candidate == token:
                return min(1.0, below + fraction * prob)
            below += prob
        return min(1.0, below + fraction * self.tail) if self.tail > 1e-9 else None

    def tempered(self, temperature: float) -> CoarseLaw:
        """Another law, for the control: the outcomes at a temperature, the tail being one of them."""
        powers = [prob ** (1 / temperature) for prob in (*self.probs, self.tail)]
        return CoarseLaw(self.ids, [power / sum(powers) for power in powers[:-1]], self.top_gap)


LawSource = Callable[[Sequence[Text]], list[CoarseLaw]]


class LawBook:
    """Laws by text, asked for once."""

    def __init__(self, source: LawSource):
        self.source = source
        self.known: dict[Text, CoarseLaw] = {}

    def learn(self, texts: Iterable[Text]) -> None:
        missing = sorted({text for text in texts if text not in self.known})
        progress = Progress("laws", total=len(missing), unit="prefixes")
        for begin in range(0, len(missing), BATCH):
            part = missing[begin : begin + BATCH]
            self.known.update(zip(part, self.source(part)))
            progress.update(begin + len(part))
        progress.close()

    def __getitem__(self, text: Text) -> CoarseLaw:
        return self.known[text]


def law_source(config: AuditConfig, client: AuditClient) -> LawSource:
    return told_by_target(config) if config.target else told_by_server(config, client)


def laws_are_told(config: AuditConfig) -> bool:
    """Whether a server's logprobs, or a target here, make the law of the samples."""
    return config.target is not None or _unfiltered(config) or 0 < config.top_k <= MAX_LOGPROBS


def _unfiltered(config: AuditConfig) -> bool:
    filtered = config.top_p < 1 or config.min_p > 0 or config.top_k > 0
    # Greedy text is held against the likeliest token, which no temperature or filter changes.
    return config.temperature == 0 or (config.temperature == 1 and not filtered)


def told_by_server(config: AuditConfig, client: AuditClient) -> LawSource:
    """The server's logprobs of the first token after a prompt, which no draft has touched."""
    if not laws_are_told(config):
        raise UserError(
            f"{MAX_LOGPROBS} logprobs of the server do not make the filtered law; give a top_k up to {MAX_LOGPROBS}, --target, "
            "or --compare-url with a server that does not speculate"
        )

    def law(text: Text) -> CoarseLaw:
        body = {"max_tokens": 1, "temperature": 0.0, "logprobs": MAX_LOGPROBS, "ignore_eos": True}
        top = client.complete(list(text), **body).top
        if not top:
            raise UserError("the server tells no top_logprobs; start it with logprobs enabled, or give --target")
        ranked = sorted(top[0].items(), key=lambda pair: -pair[1])
        gap = ranked[0][1] - ranked[1][1] if len(ranked) > 1 else 0.0
        if _unfiltered(config):
            return CoarseLaw([token for token, _ in ranked], [math.exp(value) for _, value in ranked], gap)
        return _filtered(torch.tensor([[value for _, value in ranked]]), [token for token, _ in ranked], config, gap)

    return lambda texts: client.map(law, texts)


def told_by_target(config: AuditConfig) -> LawSource:
    """A model run here, in float32."""
    target = Target.load(config.target, dtype=torch.float32, device=config.device, trust_remote_code=config.trust_remote_code)

    def law(text: Text) -> CoarseLaw:
        ids = torch.tensor([text], device=config.device)
        _, hidden = target.states(ids, torch.ones_like(ids), ())
        logits = target.head(hidden[:, -1]).float().cpu()
        likeliest = logits.log_softmax(-1)[0].topk(2).values.tolist()
        return _filtered(logits, list(range(logits.shape[-1])), config, likeliest[0] - likeliest[1])

    return lambda texts: [law(text) for text in texts]


def _filtered(logits: torch.Tensor, ids: list[int], config: AuditConfig, gap: float) -> CoarseLaw:
    """The processed law of logits [1, n] over the tokens `ids`; nothing lies outside them."""
    rows = SamplingRows.of([config.temperature], top_k=[config.top_k], top_p=[config.top_p], min_p=[config.min_p])
    probs = process(logits, rows)[0].double().softmax(-1)
    order = probs.argsort(descending=True)
    order = order[probs[order] > 0]
    return CoarseLaw([ids[place] for place in order.tolist()], probs[order].tolist(), gap)
