"""Drafts that stand in for trained ones, and trained ones that have learned nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, TrainedDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import FixedTree, SampledTree, TreeShape
from draftsmith.drafters.trees.candidates import FixedLevels, TreeDistributions, choose_fixed
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample_without_replacement


class Uncached:
    """What a drafter is that reads no states and keeps nothing."""

    family: str = "stand-in"
    taps: tuple[int, ...] = ()

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        return None

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1


class Knowing(Uncached):
    """Drafts the text, prompt and answer, and one token behind its end."""

    def __init__(self, text: list[int]):
        self.text = text

    def propose(self, inputs: DraftInputs) -> Proposal:
        width = int(inputs.num_draft.max())
        drafts = [(self.text + [9] * width)[len(history) :][:width] for history in inputs.histories]
        return Proposal(tokens=torch.tensor(drafts), lengths=inputs.num_draft, logits=None)


class Junk(Uncached):
    """Drafts of tokens that the target hardly ever keeps, so that rounds end in rejections."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        width = int(inputs.num_draft.max())
        rows = [
            [(7 * len(history) + place) % 96 for place in range(width)]
            for history in inputs.histories
        ]
        return Proposal(
            tokens=torch.tensor(rows).view(len(rows), width),
            lengths=inputs.num_draft.clone(),
            logits=None,
        )


class Offering(Uncached):
    """Drafts one token everywhere."""

    def __init__(self, token: int):
        self.token = token

    def propose(self, inputs: DraftInputs) -> Proposal:
        size, depth = len(inputs.num_draft), int(inputs.num_draft.max())
        tokens = torch.full((size, depth), self.token)
        return Proposal(tokens=tokens, lengths=inputs.num_draft, logits=None)


def near(target: Target, noise: float = 0.02) -> DraftLm:
    """Close to the target, so that many drafts are kept: its weights with some noise."""
    drafter = DraftLm.create(DraftLmOptions(init=target.name), target, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            own = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(noise * own)
    return drafter.eval()


def unlike(target: Target, seed: int, family: str = "eagle3", **options: object) -> TrainedDrafter:
    """Unlike that of any other seed; new drafts are much alike, most repeating the target's state
    through the target's head."""
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    drafter = FAMILIES[family].create(
        OPTIONS[family](**options), target, seed=seed, token_counts=counts
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=generator),
                alpha=float(weight.float().square().mean().sqrt()),
            )
    return drafter.eval()


class NearTrees(Uncached):
    """Trees of the target's own distributions under some noise, so that many drafts are kept and
    many are not.

    Three children, two of each, one of each: drawn for a tree that is drawn, else the likeliest
    ones. `lie`: it tells distributions that nothing was drawn from.
    """

    def __init__(self, target: Target, *, lie: bool = False):
        self.target, self.lie = target, lie
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def propose(self, inputs: DraftInputs) -> Proposal:
        raise AssertionError("a tree was asked for")

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        size, draws = len(inputs.num_draft), isinstance(shape, SampledTree)
        nodes: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # (token, parent)
        told: list[torch.Tensor] = []
        q_rows = torch.full((size, 16), -1)
        level: list[list[tuple[int, tuple[int, ...]]]] = [[(-1, ())] for _ in range(size)]
        for depth, count in enumerate((3, 2, 1)):
            slots = [(row, node, path) for row in range(size) for node, path in level[row]]
            texts = [(*inputs.histories[row], *path) for row, _, path in slots]
            rows = torch.tensor([row for row, _, _ in slots])
            distribution = process(
                torch.stack([self.logits(text) for text in texts]), inputs.sampling.select(rows)
            )
            positions = torch.tensor([len(inputs.histories[row]) + depth for row, _, _ in slots])
            drawn = sample_without_replacement(
                distribution, inputs.seeds[rows], positions, Purpose.DRAFT, count
            )
            children = drawn if draws else distribution.topk(count, dim=1).indices
            level = [[] for _ in range(size)]
            for (row, node, path), tokens, q in zip(slots, children.tolist(), distribution):
                q_rows[row, node + 1] = len(told)
                told.append(q)
                for token in tokens:
                    level[row].append((len(nodes[row]), (*path, token)))
                    nodes[row].append((token, node))
        proposal = Proposal(
            tokens=torch.tensor([[token for token, _ in row] for row in nodes]),
            lengths=inputs.num_draft.clamp(max=15),
            logits=None,
            parents=torch.tensor([[parent for _, parent in row] for row in nodes]),
        )
        if not draws:
            return proposal
        logits = torch.stack(told)
        if self.lie:
            logits = torch.where(logits > -torch.inf, -logits, -torch.inf)
        return replace(proposal, logits=logits, q_rows=q_rows)

    def logits(self, text: tuple[int, ...]) -> torch.Tensor:
        if text not in self.known:
            tokens = torch.tensor([text])
            _, hidden = self.target.states(tokens, torch.ones_like(tokens), ())
            logits = self.target.head(hidden[0, -1]).float()
            generator = torch.Generator().manual_seed(hash(text) % 2**31)
            noise = torch.randn(logits.shape, generator=generator)
            # Only tokens that the target may emit, or nothing would ever be kept.
            self.known[text] = torch.where(
                logits >= logits.topk(4).values[-1], logits + noise, -torch.inf
            )
        return self.known[text]


class NearHeads(NearTrees):
    """The likeliest tokens of each depth behind the likeliest ones before, as heads that do not see
    each other's drafts may have them; `lie`: it tells them as draws."""

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
        if not self.lie:
            return proposal
        q_rows = proposal.q_rows.clone()
        q_rows[:, 0] = torch.arange(len(texts))
        return replace(proposal, logits=process(told[0], inputs.sampling), q_rows=q_rows)
