"""Reference distributions of sampled tokens, from a server's logprobs or from a target run here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.drafters.target.device import load_target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.progress import Progress
from draftsmith.serve.audit.client import MAX_LOGPROBS, AuditClient
from draftsmith.serve.audit.config import AuditConfig

BATCH = 200  # distributions requested between two progress lines
TARGET_BATCH = 16  # texts of one pass of a target run here
MOST_OUTCOMES = 64  # of a target run here, named one by one; the others are the tail

Text = tuple[int, ...]  # token ids of context and continuation so far


@dataclass(frozen=True)
class CoarseDistribution:
    """The probabilities of some tokens, likeliest first; all others are one outcome, the tail."""

    ids: list[int]
    probs: list[float]
    # logprob distance of the two likeliest tokens before any filter; 0 for one token
    top_gap: float

    @property
    def rest(self) -> float:
        """Probability of the tail, 0 where it is rounding."""
        tail = 1.0 - sum(self.probs)
        return tail if tail > 1e-9 else 0.0


class Path(NamedTuple):
    """A text whose prefixes of `begin` tokens and more are followed by sampled tokens, itself
    included."""

    text: Text
    begin: int


class DistributionBook:
    """Distributions by text, each requested once."""

    def __init__(self, source: ReferenceSource):
        self.source = source
        self.known: dict[Text, CoarseDistribution] = {}

    def after(self, texts: Sequence[Text]) -> list[CoarseDistribution]:
        self.fetch_along(Path(text, len(text)) for text in texts)
        return [self.known[text] for text in texts]

    def fetch_along(self, paths: Iterable[Path]) -> None:
        """Fetch the distributions of all prefixes of each path, which costs one pass per text."""
        missing = sorted({path for path in paths if path.text not in self.known})
        progress = Progress(
            "distributions", total=len(missing), unit="texts", shows=len(missing) > 1
        )
        for begin in range(0, len(missing), BATCH):
            part = missing[begin : begin + BATCH]
            for path, distributions in zip(part, self.source.along(part), strict=True):
                texts = [path.text[:length] for length in range(path.begin, len(path.text) + 1)]
                self.known.update(zip(texts, distributions, strict=True))
            progress.update(begin + len(part))
        progress.close()

    def __getitem__(self, text: Text) -> CoarseDistribution:
        return self.known[text]


def reference_exists(config: AuditConfig) -> bool:
    """True when a server's logprobs, or a target here, give the distribution of the samples."""
    return config.target is not None or _unfiltered(config) or 0 < config.top_k <= MAX_LOGPROBS


def _unfiltered(config: AuditConfig) -> bool:
    filtered = config.top_p < 1 or config.min_p > 0 or config.top_k > 0
    # Greedy text is compared with the likeliest token, which no temperature or filter changes.
    return config.temperature == 0 or (config.temperature == 1 and not filtered)


class ServerDistributions:
    """Distributions from the server's logprobs of a prompt's tokens and of the first token after
    it, none of which is drafted."""

    def __init__(self, config: AuditConfig, client: AuditClient):
        if not reference_exists(config):
            raise UserError(
                f"{MAX_LOGPROBS} logprobs of the server do not determine the filtered "
                f"distribution; give a top_k up to {MAX_LOGPROBS}, --target, or --compare-url "
                "with a server that does not speculate"
            )
        self.config, self.client = config, client
        self.echoes = True  # until the server leaves out the logprobs of a prompt

    def along(self, paths: Sequence[Path]) -> list[list[CoarseDistribution]]:
        """The distributions after `text[:begin]`, `text[:begin + 1]`, ..., `text` of each path."""
        return self.client.map(self._along, paths)

    def _after(self, text: Text) -> CoarseDistribution:
        top = self.client.complete(list(text), **self._body()).top
        if not top:
            raise UserError(
                "the server sends no top_logprobs; start it with logprobs enabled, or give --target"
            )
        return self._distributions(top[:1])[0]

    def _along(self, path: Path) -> list[CoarseDistribution]:
        if self.echoes and path.begin < len(path.text):
            answer = self.client.complete(list(path.text), **self._body(), echo=True)
            if len(answer.top) == len(path.text) + 1 and answer.tokens[: len(path.text)] == list(
                path.text
            ):
                return self._distributions(answer.top[path.begin :])
            self.echoes = False
        return [self._after(path.text[:length]) for length in range(path.begin, len(path.text) + 1)]

    def _body(self) -> dict[str, object]:
        return {"max_tokens": 1, "temperature": 0.0, "logprobs": MAX_LOGPROBS, "ignore_eos": True}

    def _distributions(self, tops: Sequence[dict[int, float]]) -> list[CoarseDistribution]:
        # A token that is listed because it was emitted or stands in the prompt, and not for its
        # rank, is left out.
        ranked = [sorted(top.items(), key=lambda pair: -pair[1])[:MAX_LOGPROBS] for top in tops]
        if _unfiltered(self.config):
            return [
                CoarseDistribution(
                    [token for token, _ in pairs],
                    [math.exp(value) for _, value in pairs],
                    _gap(pairs),
                )
                for pairs in ranked
            ]
        width = max(map(len, ranked))
        table = [
            [value for _, value in pairs] + [-math.inf] * (width - len(pairs)) for pairs in ranked
        ]
        ids = [[token for token, _ in pairs] + [-1] * (width - len(pairs)) for pairs in ranked]
        return _filtered(
            torch.tensor(table), torch.tensor(ids), self.config, [_gap(pairs) for pairs in ranked]
        )


def _gap(ranked: Sequence[tuple[int, float]]) -> float:
    return ranked[0][1] - ranked[1][1] if len(ranked) > 1 else 0.0


class TargetDistributions:
    """Distributions from a model run here, in float32."""

    def __init__(self, config: AuditConfig, max_length: int | None = None):
        """`max_length`: most tokens of a text that the server takes."""
        assert config.target is not None
        self.config = config
        self.target = load_target(
            config.target,
            dtype=torch.float32,
            device=config.device,
            max_length=max_length,
            trust_remote_code=config.trust_remote_code,
        )

    def along(self, paths: Sequence[Path]) -> list[list[CoarseDistribution]]:
        """As those of a server."""
        found: dict[Path, list[CoarseDistribution]] = {}
        for length in sorted({len(path.text) for path in paths}):
            alike = [path for path in paths if len(path.text) == length]
            for begin in range(0, len(alike), TARGET_BATCH):
                part = alike[begin : begin + TARGET_BATCH]
                found |= zip(part, self._along(part), strict=True)
        return [found[path] for path in paths]

    def _along(self, paths: Sequence[Path]) -> list[list[CoarseDistribution]]:
        ids = torch.tensor([path.text for path in paths], device=self.config.device)
        _, hidden = self.target.states(ids, torch.ones_like(ids), ())
        return [
            self._distributions(row[path.begin - 1 :])
            for path, row in zip(paths, hidden, strict=True)
        ]

    def _distributions(self, hidden: torch.Tensor) -> list[CoarseDistribution]:
        logits = self.target.head(hidden).float().cpu()
        likeliest = logits.log_softmax(-1).topk(2, dim=-1).values
        ids = torch.arange(logits.shape[-1]).expand_as(logits)
        return _filtered(logits, ids, self.config, (likeliest[:, 0] - likeliest[:, 1]).tolist())


ReferenceSource = ServerDistributions | TargetDistributions


def distribution_source(config: AuditConfig, client: AuditClient) -> ReferenceSource:
    if config.target is None:
        return ServerDistributions(config, client)
    return TargetDistributions(config, client.max_length)


def _filtered(
    logits: torch.Tensor, ids: torch.Tensor, config: AuditConfig, gaps: Sequence[float]
) -> list[CoarseDistribution]:
    """Processed distributions of logits [n, m] over the tokens `ids` [n, m], which are the whole
    vocabulary or all tokens that a filter keeps."""
    count = len(logits)
    rows = SamplingRows.of(
        [config.temperature] * count,
        top_k=[config.top_k] * count,
        top_p=[config.top_p] * count,
        min_p=[config.min_p] * count,
    )
    top = (
        process(logits, rows)
        .double()
        .softmax(-1)
        .topk(min(MOST_OUTCOMES, logits.shape[-1]), dim=-1)
    )
    tokens = ids.gather(1, top.indices).tolist()
    distributions = []
    for names, probs, gap in zip(tokens, top.values.tolist(), gaps, strict=True):
        kept = sum(prob > 0 for prob in probs)
        distributions.append(CoarseDistribution(names[:kept], probs[:kept], gap))
    return distributions
