"""What tests of served text share: drafters by name, drafts that are right for a while, references
read without an engine."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.drafters.tree_shape import GrownShape, TreeShape
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.statistics import Fit
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from tests.adjusting import adjusted
from tests.goodness import g_test
from tests.stand_in_drafts import unlike

TRAINED = [name for name in OPTIONS if name in FAMILIES]
TEXT = ["suffix", "suffix and draft-lm"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# The largest gap of the two best logits that rounding in another batch shape could turn round.
NOISE = 1e-4

Greedy = tuple[list[int], list[float]]  # tokens, and the top-2 margin of each choice
Distribution = dict[tuple[int, ...], float]  # every answer with its probability


def make_drafter(family: str, target: Target, **options: Any) -> ServingDrafter:
    """A new draft; `options` are those of a trained one."""
    if "suffix" in family:
        # Remembering the same answers from the engine before, it would be right too often.
        text = Suffix(max_cached_requests=0)
        if family == "suffix":
            return text
        both = TextFirst(make_drafter("draft-lm", target, **options), text)
        both.model_share = 0.3  # so that text drafts from the first rounds on
        return both
    if family == "draft-lm" and not options:
        options = {"hidden_size": 16, "num_attention_heads": 2}
    counts = torch.arange(target.vocab_size).flip(0)
    made = FAMILIES[family].create(OPTIONS[family](**options), target, seed=1, token_counts=counts)
    return made.to(device=target.device, dtype=target.dtype).eval()


def by_transformers(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens by whole passes without a cache, with the log-probability of each choice."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            row = torch.log_softmax(logits, dim=-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs


def publish(root: Path, drafter: Any, of: Target, **record: Any) -> int:
    """By hand, whatever the draft is worth; `record` is what else is written down of the version."""
    known = {"family": drafter.family, "target": checkpoint.identity(of), "parent": None}
    whole = {"data_range": {}, "gate": {}} | known | record
    return versions.publish(root, lambda folder: checkpoint.save(drafter, folder, of), **whole)


class Around:
    """A drafter around another one."""

    def __init__(self, drafter: ServingDrafter):
        self.drafter = drafter
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.propose, self.cached_after = drafter.propose, drafter.cached_after


class Oracle(Around):
    """A real drafter whose drafts are overwritten with the target's own continuation for a while,
    so that every accepted count occurs however bad the untrained drafter is. What the drafter
    itself drafted stays as the rejected rest."""

    def __init__(self, drafter: ServingDrafter, known: list[list[int]]):
        super().__init__(drafter)
        del self.propose, self.cached_after
        self.known, self.random = known, random.Random(0)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        # What the drafter read after the last token were its own drafts, not the ones put in their
        # place.
        return min(self.drafter.cached_after(last, drafted, accepted), last + 1)

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        tokens, lengths = proposal.tokens.clone(), proposal.lengths.clone()
        for row, history in enumerate(inputs.histories):
            text = next(text for text in self.known if text[: len(history)] == history)
            right = text[len(history) :][: self.random.randint(0, int(inputs.num_draft[row]))]
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
            lengths[row] = max(int(lengths[row]), len(right))
        return Proposal(tokens=tokens, lengths=lengths, logits=None)


class TreeOracle(Around):
    """A real drafter; on one random path of each tree its tokens are the target's own for a while,
    so that every accepted count and every move of keys occurs. What it tells is deterministic."""

    def __init__(self, drafter: ServingDrafter, known: list[list[int]]):
        super().__init__(drafter)
        self.known, self.random = known, random.Random(0)
        self.shapes = getattr(drafter, "shapes", get_args(GrownShape))

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        proposal = self.drafter.propose_tree(inputs, shape)
        tokens = proposal.tokens.clone()
        for row, history in enumerate(inputs.histories):
            text = next(text for text in self.known if text[: len(history)] == history)
            node = self.random.randrange(-1, int(proposal.lengths[row]))
            path = []
            while node >= 0:
                path.insert(0, node)
                node = int(proposal.parents[row, node])
            for node, token in zip(path, text[len(history) :]):
                tokens[row, node] = token
        return replace(proposal, tokens=tokens, logits=None, q_rows=None)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [5, 17, 1, 30, 9, 16, 40, 2][:count]
    return [torch.randint(3, 288, (size,), generator=generator).tolist() for size in sizes]


def plain_greedy(target: Target, batch: list[list[int]], num_tokens: int) -> list[Greedy]:
    """Token by token with the whole texts each time: no cache, no engine. Each text is then read
    alone."""
    sizes = torch.tensor([len(prompt) for prompt in batch])
    width = int(sizes.max()) + num_tokens
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, prompt in enumerate(batch):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(batch))
    for step in range(num_tokens):
        mask = (torch.arange(width) < (sizes + step)[:, None]).float()
        longest = int(sizes.max()) + step
        _, hidden = target.states(tokens[:, :longest], mask[:, :longest], ())
        tokens[rows, sizes + step] = target.head(hidden[rows, sizes + step - 1]).argmax(-1)
    return [
        _chosen_alone(target, tokens[row, : size + num_tokens], num_tokens)
        for row, size in enumerate(sizes.tolist())
    ]


def _chosen_alone(target: Target, text: torch.Tensor, num_tokens: int) -> Greedy:
    """The last tokens of a text, which is read without padding and without other texts, and the
    top-2 margins of their choices."""
    _, hidden = target.states(text[None], torch.ones(1, len(text)), ())
    best = target.head(hidden[0, -num_tokens - 1 : -1]).float().topk(2)
    tokens, margins = text[-num_tokens:].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
    assert_same(best.indices[:, 0].tolist(), (tokens, margins))
    return tokens, margins


def assert_same(tokens: list[int], expected: Greedy) -> None:
    for index, (token, right, margin) in enumerate(zip(tokens, *expected, strict=True)):
        if token != right:
            assert margin < NOISE, f"token {index} is {token} instead of {right}, margin {margin}"
            return


def enumerated(
    target: Target, prompt: list[int], params: SamplingParams, length: int
) -> Distribution:
    """Every answer, or its first `length` tokens, with its probability, by enumeration under the
    target and transformers' processors."""
    rows = SamplingRows.of(
        [params.temperature], top_k=[params.top_k], top_p=[params.top_p], min_p=[params.min_p]
    )
    ends = () if params.ignore_eos else target.eos_token_ids
    done: Distribution = {}
    growing: Distribution = {(): 1.0}
    while growing:
        known, growing = growing, {}
        texts = torch.tensor([[*prompt, *answer] for answer in known])  # of one length
        _, hidden = target.states(texts, torch.ones_like(texts), ())
        for (answer, mass), logits in zip(known.items(), target.head(hidden[:, -1]).float()):
            scores = adjusted(params, [*prompt, *answer], len(prompt), ends, logits)
            if params.grammar is not None:
                scores = scores.masked_fill(~grammatical(target, list(answer)), -torch.inf)
            probs = torch.softmax(process(scores[None], rows).double(), -1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                is_whole = len(answer) + 1 == length or token in ends
                (done if is_whole else growing)[(*answer, token)] = mass * float(probs[token])
    return done


# Of the one grammar that is enumerated: its sentences, and their beginnings.
PATTERN, BEGINNINGS = "[abd]{1,2}c", "[abd]{0,2}|[abd]{1,2}c"


def grammatical(target: Target, answer: list[int]) -> torch.Tensor:
    """[V] bool: which tokens leave a beginning of a sentence, and the end behind a whole one."""
    tokenizer = target.tokenizer()
    begun = tokenizer.decode(answer)
    pieces = [
        tokenizer.decode([token], skip_special_tokens=True) for token in range(target.vocab_size)
    ]
    mask = torch.tensor(
        [bool(piece and re.fullmatch(BEGINNINGS, begun + piece)) for piece in pieces]
    )
    mask[list(target.eos_token_ids)] = bool(re.fullmatch(PATTERN, begun))
    return mask


def fit(distribution: Distribution, texts: Iterable[list[int]]) -> Fit:
    """How well the beginnings of texts follow the distribution."""
    length = max(map(len, distribution))
    counts = Counter(tuple(text[:length]) for text in texts)
    cells = [*distribution, *(counts.keys() - distribution.keys())]
    probs = torch.tensor([distribution.get(cell, 0.0) for cell in cells], dtype=torch.float64)
    return g_test(torch.tensor([counts[cell] for cell in cells]), probs)


class Swaps:
    """Other weights of an engine's draft at each call."""

    def __init__(self, engine: EngineCore, family: str, root: Path):
        self.engine, self.rounds, target = engine, 0, engine.runner.target
        self.folders = [str(root / str(seed)) for seed in (1, 2)]
        for seed, folder in enumerate(self.folders, 1):
            checkpoint.save(unlike(target, seed, family, **small(family)), folder, target)

    def __call__(self) -> None:
        self.engine.draft.prepare(self.folders[self.rounds % 2], str(self.rounds))
        self.rounds += 1


def small(family: str) -> dict[str, int]:
    """Options of a family whose defaults would copy the target."""
    return {"num_layers": 1, "hidden_size": 32} if family == "draft-lm" else {}


def finish(engine: EngineCore, between: Callable[[], object] | None = None) -> None:
    """All rounds until nobody is left, with a call before each."""
    while engine.busy:
        if between is not None:
            between()
        engine.step()
