"""The joint distribution of tokens sampled through trees is the target's; each way of getting it
wrong is seen by the same test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import FixedTree, TreeShape, parse_tree
from draftsmith.drafters.trees.candidates import TreeDistributions
from draftsmith.drafters.trees.fixed import FixedLevels, choose_fixed
from draftsmith.drafters.trees.layout import NodeLayout
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample_without_replacement
from draftsmith.kernels.statistics import detectable_bias, g_test
from draftsmith.kernels.verify.verdict import DraftTree, depths
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import engine as engine_module
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request, RequestOptions, Update
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import Distribution, enumerated, fit
from tests.stand_in_drafts import Uncached

FALSE_ALARM = 1e-6
NUM_SAMPLES = 768
MANY_SAMPLES = 22_000
LENGTH = 4  # tokens looked at; the first one is decided without drafts
SAMPLED, DYNAMIC = "sampled:3x2x1", "dynamic:nodes=15,depth=3,width=3"
PARAMS = SamplingParams(temperature=1.2, top_k=4, max_tokens=16, ignore_eos=True)


class Near(Uncached):
    """Drafts with the target's own distributions under some noise, so that many drafts are kept and
    many are not; without a cache.

    A tree that is not `SAMPLED` gets the likeliest children everywhere; `lie` "q" tells a
    distribution that nothing was drawn from.
    """

    def __init__(self, target: Target, *, lie: str = ""):
        self.target, self.lie = target, lie
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def propose(self, inputs: DraftInputs) -> Proposal:
        raise AssertionError("a tree was asked for")

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        draws = shape == parse_tree(SAMPLED)
        branches = (3, 2, 1)
        size = len(inputs.num_draft)
        nodes = [[] for _ in range(size)]  # (token, parent, path)
        distributions: list[torch.Tensor] = []
        q_rows = torch.full((size, 16), -1)
        level = [[(-1, ())] for _ in range(size)]
        for depth, count in enumerate(branches):
            slots = [(row, node, path) for row in range(size) for node, path in level[row]]
            logits = torch.stack(
                [self.logits((*inputs.histories[row], *path)) for row, _, path in slots]
            )
            rows = torch.tensor([row for row, _, _ in slots])
            distribution = process(logits, inputs.sampling.select(rows))
            positions = torch.tensor([len(inputs.histories[row]) + depth for row, _, _ in slots])
            drawn = sample_without_replacement(
                distribution, inputs.seeds[rows], positions, Purpose.DRAFT, count
            )
            children = drawn if draws else distribution.topk(count, dim=1).indices
            level = [[] for _ in range(size)]
            for (row, node, path), tokens, told in zip(slots, children.tolist(), distribution):
                q_rows[row, node + 1] = len(distributions)
                distributions.append(told)
                for token in tokens:
                    level[row].append((len(nodes[row]), (*path, token)))
                    nodes[row].append((token, node))
        lengths = inputs.num_draft.clamp(max=15)
        tokens = torch.tensor([[token for token, _ in row] for row in nodes])
        parents = torch.tensor([[parent for _, parent in row] for row in nodes])
        told = torch.stack(distributions)
        if self.lie == "q":
            told = torch.where(told > -torch.inf, -told, -torch.inf)
        if not draws:
            return Proposal(tokens=tokens, lengths=lengths, logits=None, parents=parents)
        return Proposal(tokens=tokens, lengths=lengths, logits=told, parents=parents, q_rows=q_rows)

    def logits(self, text: tuple[int, ...]) -> torch.Tensor:
        if text not in self.known:
            tokens = torch.tensor([text])
            _, hidden = self.target.states(tokens, torch.ones_like(tokens), ())
            logits = self.target.head(hidden[0, -1]).float()
            noise = torch.randn(
                logits.shape, generator=torch.Generator().manual_seed(hash(text) % 2**31)
            )
            # Only tokens that the target may emit, or nothing would ever be kept.
            self.known[text] = torch.where(
                logits >= logits.topk(4).values[-1], logits + noise, -torch.inf
            )
        return self.known[text]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


@pytest.fixture(scope="module")
def prompt(target: Target) -> list[int]:
    return torch.randint(
        3, target.vocab_size, (11,), generator=torch.Generator().manual_seed(5)
    ).tolist()


@pytest.fixture(scope="module")
def distribution(target: Target, prompt: list[int]) -> Distribution:
    return enumerated(target, prompt, LENGTH, temperature=PARAMS.temperature, top_k=PARAMS.top_k)


def served(
    target: Target,
    drafter: ServingDrafter,
    tree: str,
    prompt: list[int],
    num_samples: int = NUM_SAMPLES,
) -> tuple[list[tuple[int, ...]], EngineCore]:
    """The first LENGTH tokens of answers, which are then cancelled: long answers have large trees
    to their end."""
    engine = build_engine(
        target,
        drafter,
        EngineConfig(
            tree=tree, max_batch=64, max_length=48, max_round_tokens=2048, max_queue=99_999
        ),
    )

    def stop(request: Request, update: Update) -> None:
        if len(request.output) >= LENGTH:
            engine.cancel(request)

    requests = [
        engine.submit(prompt, replace(PARAMS, seed=seed), stop, options=RequestOptions(text=False))
        for seed in range(num_samples)
    ]
    while engine.busy:
        engine.step()
    return [tuple(request.output[:LENGTH]) for request in requests], engine


class Heads(Near):
    """The likeliest tokens of each depth behind the likeliest ones before, as heads that do not see
    each other's drafts may have them."""

    shapes = (FixedTree,)

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        texts = [tuple(history) for history in inputs.histories]
        told: list[torch.Tensor] = []
        for _ in range(3):
            told.append(torch.stack([self.logits(text) for text in texts]))
            texts = [(*text, int(row.argmax())) for text, row in zip(texts, told[-1], strict=True)]
        levels = FixedLevels.of(shape, 3, apart=inputs.adjust is not None)
        tensors = [torch.tensor(column) for column in levels.columns()]
        distributions = TreeDistributions(
            inputs, torch.arange(len(texts)), vocab_size=told[0].shape[1], vocab_map=None
        )
        proposal = choose_fixed(
            distributions,
            told.__getitem__,
            levels.on_device(tensors),
            inputs.num_draft,
            min(int(inputs.num_draft.max()), levels.num_nodes),
        )
        if self.lie != "q":
            return proposal
        q_rows = proposal.q_rows.clone()
        q_rows[:, 0] = torch.arange(len(texts))
        return replace(proposal, logits=process(told[0], inputs.sampling), q_rows=q_rows)


FIXED = "choices:0,0.0,1,0.1,2,0.0.0,1.0,0.0.1"


@pytest.mark.parametrize("lie", ["", "q"])
def test_trees_of_given_choices_keep_the_joint_distribution(
    lie: str, target: Target, prompt: list[int], distribution: Distribution
) -> None:
    """As Medusa drafts them; not so where they are told as draws, which they are not."""
    texts, engine = served(target, Heads(target, lie=lie), FIXED, prompt)
    found = fit(distribution, texts, g_test)
    assert (found.p_value < FALSE_ALARM) if lie else (found.p_value > FALSE_ALARM), found
    assert min(engine.stats.accepted[depth] for depth in range(3)) > NUM_SAMPLES / 20
    assert not engine.stats.fallbacks


def blind(tree: DraftTree) -> NodeLayout:
    """Nodes that see their siblings and cousins."""
    return NodeLayout(depths(tree).clamp(min=0), torch.full_like(tree.parents, -1))


@pytest.mark.parametrize("broken", ["q", pytest.param("masks", marks=pytest.mark.long)])
def test_broken_rounds_are_seen(
    broken: str,
    target: Target,
    prompt: list[int],
    distribution: Distribution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken == "masks":
        monkeypatch.setattr(NodeLayout, "of", blind)
    texts, _ = served(target, Near(target, lie=broken), SAMPLED, prompt)
    assert fit(distribution, texts, g_test).p_value < FALSE_ALARM


@pytest.mark.long
def test_keys_left_where_they_were_are_seen(
    target: Target,
    prompt: list[int],
    distribution: Distribution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "move_kept", lambda *arguments: None)
    texts, _ = served(target, Near(target), SAMPLED, prompt, 4096)
    assert fit(distribution, texts, g_test).p_value < FALSE_ALARM


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tree", [SAMPLED, DYNAMIC])
@pytest.mark.parametrize("family", ["near", "eagle3"])
def test_the_joint_distribution_of_many_samples(
    family: str,
    tree: str,
    target: Target,
    prompt: list[int],
    distribution: Distribution,
) -> None:
    drafter = (
        Near(target) if family == "near" else Eagle3.create(Eagle3Options(), target, seed=1).eval()
    )
    texts, engine = served(target, drafter, tree, prompt, MANY_SAMPLES)
    found = fit(distribution, texts, g_test)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(MANY_SAMPLES, found.degrees, FALSE_ALARM) < 0.05
    assert engine.stats.accepted[0] > 0 and not engine.stats.fallbacks
