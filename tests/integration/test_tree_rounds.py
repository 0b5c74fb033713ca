"""Trees in the engine: greedy output is greedy output without them, sampled output has the target's
distribution, and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.options import (
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
)
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import GrownShape, TreeShape
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord
from draftsmith.serve.command import check
from draftsmith.serve.config import EngineConfig, ServeConfig, ServedSpeculation
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# the largest gap of the two best logits that rounding in another batch shape could turn round
NOISE = 1e-4
FALSE_ALARM = 1e-6
TREES = ["dynamic:nodes=12,depth=4,width=3", "sampled:3x2x1"]
MIXED = "+".join(TREES)


def make(family: str, target: Target) -> ServingDrafter:
    made = {
        "eagle3": lambda: Eagle3.create(
            Eagle3Options(draft_vocab_size=200), target, seed=1, token_counts=torch.arange(288)
        ),
        "eagle1": lambda: Eagle1.create(Eagle1Options(), target, seed=1),
        "medusa": lambda: Medusa.create(MedusaOptions(num_heads=4, num_layers=1), target, seed=1),
        "mtp": lambda: Mtp.create(MtpOptions(), target, seed=1),
    }
    return made[family]().eval()


class TreeOracle:
    """A real drafter; on one random path of each tree its tokens are the target's own for a while,
    so that every accepted count and every move of keys occurs. What it tells is deterministic."""

    def __init__(self, drafter: ServingDrafter, known: list[list[int]]):
        self.drafter, self.known, self.random = drafter, known, random.Random(0)
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.propose, self.cached_after = drafter.propose, drafter.cached_after
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


@pytest.fixture(scope="module")
def load(tiny_target: Callable[..., str]) -> Callable[[str], Target]:
    loaded: dict[str, Target] = {}

    def get(arch: str) -> Target:
        if arch not in loaded:
            loaded[arch] = Target.load(tiny_target(arch))
        return loaded[arch]

    return get


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, 288, (size,), generator=generator).tolist()
        for size in [5, 17, 1, 30, 9, 16, 40, 2][:count]
    ]


def plain_greedy(
    target: Target, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    tokens, margins = list(prompt), []
    for _ in range(num_tokens):
        _, hidden = target.states(torch.tensor([tokens]), torch.ones(1, len(tokens)), ())
        best = target.head(hidden[0, -1]).float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], margins


def assert_same(tokens: list[int], expected: tuple[list[int], list[float]]) -> None:
    for index, (token, right, margin) in enumerate(zip(tokens, *expected, strict=True)):
        if token != right:
            assert margin < NOISE, f"token {index} is {token} instead of {right}, margin {margin}"
            return


@pytest.mark.parametrize("arch, family", [
    ("mistral", "eagle3"),
    ("llama4", "eagle3"),
    ("llama", "medusa"),
    pytest.param("gemma2", "mtp", marks=pytest.mark.long),
    pytest.param("llama", "eagle1", marks=pytest.mark.long),
])  # fmt: skip
def test_trees_do_not_change_greedy_output(
    arch: str, family: str, load: Callable[[str], Target]
) -> None:
    """Sliding windows, chunks and soft caps included. Small blocks and little memory, so that requests are
    preempted in between."""
    target = load(arch)
    batch = prompts(8)
    expected = [plain_greedy(target, prompt, 24) for prompt in batch]
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    drafter = make(family, target)
    seen: set[int] = set()
    for tree in ["medusa"] if family == "medusa" else TREES:
        for used in (drafter, TreeOracle(drafter, known)):
            engine = build_engine(
                target,
                used,
                EngineConfig(tree=tree, max_batch=5, block_size=8, num_blocks=18, max_length=80),
            )
            completions = engine.generate(batch, GREEDY)
            for completion, right in zip(completions, expected):
                assert_same(completion.tokens, right)
            assert (
                not engine.stats.fallbacks
                and engine.stats.num_tree_nodes > engine.stats.num_draft_tokens > 0
            )
            assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable
            assert engine.scheduler.num_preemptions > 0
        seen |= {
            accepted for completion in completions for accepted in completion.speculation.accepted
        }
    assert seen >= {0, 1, 2, 3}


def test_rows_of_all_kinds_share_a_round(load: Callable[[str], Target]) -> None:
    """k is the most nodes of a request's tree: none, one, a few, more than there are. Some answers
    are a token or two long."""
    target = load("llama")
    batch = prompts(6)
    expected = [plain_greedy(target, prompt, 24) for prompt in batch]
    oracle = TreeOracle(
        make("eagle3", target), [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    )
    for tree in TREES:
        engine = build_engine(target, oracle, EngineConfig(tree=tree, max_round_tokens=23))
        ks, lengths = (0, 1, 3, 60, None, None), (24, 24, 24, 24, 1, 2)
        requests = [
            engine.submit(prompt, replace(GREEDY, k=k, max_tokens=length))
            for prompt, k, length in zip(batch, ks, lengths)
        ]
        while engine.busy:
            engine.step()
        for request, (tokens, margins), length in zip(requests, expected, lengths):
            assert_same(request.output, (tokens[:length], margins[:length]))
        offered = [request.speculation.offered for request in requests]
        assert (
            not offered[0] and set(offered[1]) == {1} and max(offered[2]) <= 3 < max(offered[3]) + 1
        )
        assert not offered[4] and set(offered[5]) <= {1}


def test_what_is_told_of_a_token_does_not_depend_on_trees(load: Callable[[str], Target]) -> None:
    """Log-probabilities, penalties along each path, stop tokens."""
    target = load("llama")
    batch = prompts(4)
    params = replace(GREEDY, logprobs=3, repetition_penalty=1.3, bad_words=((7,), (9, 11)))
    plain = build_engine(target, None, EngineConfig()).generate(batch, params)
    known = [prompt + completion.tokens for prompt, completion in zip(batch, plain)]
    for tree in TREES:
        found = build_engine(
            target, TreeOracle(make("mtp", target), known), EngineConfig(tree=tree)
        ).generate(batch, params)
        for one, other in zip(plain, found):
            assert one.tokens == other.tokens and max(other.speculation.accepted) > 1
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [token for token, _ in a.top] == [token for token, _ in b.top]
        stop = plain[0].tokens[5]
        stopping = replace(params, stop_token_ids=(stop,))
        engine = build_engine(
            target, TreeOracle(make("mtp", target), known), EngineConfig(tree=tree)
        )
        assert (
            engine.generate(batch[:1], stopping)[0].tokens
            == plain[0].tokens[: plain[0].tokens.index(stop) + 1]
        )


@pytest.mark.parametrize("tree, temperature", [(TREES[0], 1.0), (TREES[1], 0.0), (TREES[1], 1.0)])
def test_records_tell_the_kept_path_and_the_first_rejected(
    tree: str, temperature: float, load: Callable[[str], Target], records: list[RoundRecord]
) -> None:
    target = load("llama")
    drafter = make("eagle3", target)
    engine = build_engine(target, drafter, EngineConfig(tree=tree, seed=5), sink=records)
    batch = prompts(4)
    completions = engine.generate(
        batch, SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    )
    texts: dict[str, list[int]] = {}
    drafted = [record for record in records if record.drafted]
    for record in records:
        texts.setdefault(record.request, []).extend(record.context + record.committed)
    assert sorted(texts.values()) == sorted(
        prompt + completion.tokens for prompt, completion in zip(batch, completions)
    )
    assert drafted and all(len(record.drafted) - record.accepted in (0, 1) for record in drafted)
    for record in drafted:
        assert record.drafted[: record.accepted] == record.committed[: record.accepted]
        assert len(record.p) == len(record.q) == len(record.drafted)
        text = texts[record.request]
        for step, token in enumerate(record.drafted):
            ids = torch.tensor([text[: record.position] + record.drafted[:step]])
            _, hidden = target.states(ids, torch.ones_like(ids), ())
            distribution = torch.log_softmax(target.head(hidden[0, -1]).float(), -1)
            told = dict(zip(record.p[step].ids, record.p[step].logprobs))
            assert told[int(distribution.argmax())] == pytest.approx(
                float(distribution.max()), abs=1e-3
            )
            if temperature == 0 or tree.startswith("dynamic"):
                assert record.q[step].ids == [token] and record.q[step].logprobs == [0.0]
            else:
                assert len(record.q[step].ids) == 64


def test_counts_go_by_depth(load: Callable[[str], Target]) -> None:
    target = load("llama")
    engine = build_engine(target, make("eagle3", target), EngineConfig(tree="sampled:3x2x1"))
    engine.generate(prompts(3), SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
    stats = engine.stats
    assert set(stats.offered) == {0, 1, 2} and stats.num_draft_tokens == sum(stats.offered.values())
    assert stats.num_tree_nodes > 4 * stats.num_drafts
    assert all(stats.accepted[depth] <= stats.offered[depth] for depth in stats.offered)


@pytest.mark.parametrize("tree, temperature", [(TREES[0], 1.0), (TREES[1], 0.0), (TREES[1], 1.0)])
def test_broken_weights_cost_only_speed(
    tree: str, temperature: float, load: Callable[[str], Target]
) -> None:
    target = load("llama")
    drafter = make("mtp", target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(torch.nan)
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=3)
    engine = build_engine(target, drafter, EngineConfig(tree=tree))
    found = engine.generate(prompts(3), params)
    assert engine.stats.fallbacks["nan"] > 0 and engine.stats.num_accepted_tokens == 0
    assert all(len(completion.tokens) == 12 for completion in found)
    if temperature == 0:
        for prompt, completion in zip(prompts(3), found):
            assert_same(completion.tokens, plain_greedy(target, prompt, 12))


def test_who_grows_no_trees_is_refused(load: Callable[[str], Target]) -> None:
    with pytest.raises(UserError, match="grows none"):
        build_engine(load("llama"), None, EngineConfig(tree="dynamic"))
    with pytest.raises(UserError, match="judges chains"):
        build_engine(
            load("llama"),
            make("mtp", load("llama")),
            EngineConfig(tree="dynamic", verification="block"),
        )
    with pytest.raises(UserError, match="drafts of a chain"):
        speculation = ServedSpeculation(tree="auto", synthetic_acceptance=(0.5,))
        check(ServeConfig(target="t", draft="d", speculation=speculation))
    with pytest.raises(UserError, match="tree is 'round'"):
        build_engine(load("llama"), make("mtp", load("llama")), EngineConfig(tree="round"))


def finish(
    engine: Engine, prompts: list[list[int]], preempt: random.Random | None = None
) -> list[list[int]]:
    requests = [
        engine.submit(
            prompt,
            SamplingParams(
                temperature=0.9, top_k=20, seed=100 + index, max_tokens=20, ignore_eos=True
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    while engine.busy:
        engine.step()
        if preempt is not None and engine.scheduler.running and preempt.random() < 0.4:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    return [request.output for request in requests]


@pytest.mark.parametrize("tree", TREES)
def test_tokens_do_not_depend_on_preemption_chunking_or_cached_prefixes(
    tree: str, load: Callable[[str], Target]
) -> None:
    """Whatever is left behind in caches, the draft's included, would show: a seeded request's
    tokens depend on its drafts."""
    target = load("llama")
    drafter = make("eagle3", target)
    batch = [[5, 60, 7, 200, 9, 33] * 4, [9, 8, 7], [40 + i % 11 for i in range(33)]]
    expected = [
        finish(build_engine(target, drafter, EngineConfig(tree=tree)), [[3]] * index + [prompt])[-1]
        for index, prompt in enumerate(batch)
    ]
    engine = build_engine(
        target, drafter, EngineConfig(tree=tree, max_round_tokens=17, block_size=8)
    )
    for seed in (1, 2):
        assert finish(engine, batch, random.Random(seed)) == expected
    assert (
        engine.scheduler.num_preemptions > 0
        and engine.stats.prefix_cache_hits > 0
        and not engine.stats.fallbacks
    )


def test_greedy_and_sampled_requests_share_rounds_with_trees_of_their_own(
    load: Callable[[str], Target],
) -> None:
    target = load("llama")
    batch = prompts(6)
    drafter = make("eagle3", target)
    wanted = [
        replace(GREEDY, temperature=temperature, seed=50 + i)
        for i, temperature in enumerate((0.0, 1.0, 0.0, 0.7, 1.3, 0.0))
    ]
    alone = [
        build_engine(target, drafter, EngineConfig(tree=TREES[params.temperature > 0]))
        .generate([prompt], params)[0]
        .tokens
        for prompt, params in zip(batch, wanted)
    ]
    engine = build_engine(target, drafter, EngineConfig(tree=MIXED))
    requests = [engine.submit(prompt, params) for prompt, params in zip(batch, wanted)]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == alone and not engine.stats.fallbacks
