"""What lies beyond a row's length is not read: neither token ids nor parents nor distributions
there change anything or end the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels.sampling.random_streams import Purpose, sample_without_replacement
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, Verdict

ROWS, DEPTH, SIZE = 4, 3, 21


class Round(NamedTuple):
    p: torch.Tensor  # [R, V]
    drafts: torch.Tensor  # [B, K]
    lengths: torch.Tensor
    q: torch.Tensor  # [B, K, V]
    seeds: torch.Tensor
    positions: torch.Tensor

    @property
    def beyond(self) -> torch.Tensor:
        """[B, K], which entries no one may look at."""
        return torch.arange(DEPTH) >= self.lengths[:, None]


def make_round() -> Round:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 3, 2])
    p = torch.randn(ROWS, DEPTH + 1, SIZE, generator=generator)
    q = 0.9 * p[:, :-1] + 0.3 * torch.randn(ROWS, DEPTH, SIZE, generator=generator)
    seeds, positions = torch.arange(ROWS) * 7, torch.arange(ROWS)
    drafts = [
        sample_without_replacement(q[:, i], seeds, positions + i, Purpose.DRAFT, 1)
        for i in range(DEPTH)
    ]
    rows = p[torch.arange(DEPTH + 1) <= lengths[:, None]]
    return Round(rows, torch.cat(drafts, dim=1), lengths, q, seeds, positions)


def poisoned(given: Round, token: int) -> Round:
    drafts = torch.where(given.beyond, token, given.drafts)
    return given._replace(drafts=drafts, q=torch.where(given.beyond[..., None], math.nan, given.q))


def tokens_of(
    way: str, given: Round, impl: str, device: torch.device, junk: int
) -> list[list[int]]:
    """`junk` takes the place of a tree's parents and of the rows of its distributions beyond the
    lengths."""
    p, drafts, lengths, q, seeds, positions = (tensor.to(device) for tensor in given)
    told = None if way.endswith("without q") else q
    if way.startswith("tree"):
        parents = (torch.arange(DEPTH) - 1).expand(ROWS, -1)
        distributions = torch.arange(ROWS * DEPTH).view(ROWS, DEPTH)
        tree = DraftTree(drafts, torch.where(given.beyond, junk, parents).to(device), lengths)
        q_rows = torch.nn.functional.pad(
            torch.where(given.beyond, junk, distributions), (0, 1), value=junk
        ).to(device)
        none = (None, None) if told is None else (q.flatten(0, 1), q_rows)
        return verify_tree(p, tree, *none, seeds, positions, impl=impl).tokens.tolist()
    verify = verify_block if way.startswith("block") else verify_chain
    return verify(p, drafts, lengths, told, seeds, positions, impl=impl).tokens.tolist()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("way", ["chain", "chain without q", "block", "tree", "tree without q"])
def test_nothing_beyond_the_lengths_is_read(
    way: str, impl: str, device: torch.device, poisoned_empty: None
) -> None:
    given = make_round()
    clean = tokens_of(way, given, impl, device, junk=-1)
    for token in (2**62, -(10**6)):
        assert tokens_of(way, poisoned(given, token), impl, device, junk=token) == clean


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("way", ["tree", "tree without q"])
def test_nodes_that_hang_nowhere_are_passed_over(
    way: str, impl: str, device: torch.device, poisoned_empty: None
) -> None:
    """Rows padded to one length with nodes under -2 and logits that are none."""
    given = make_round()
    rows = torch.full((ROWS, DEPTH + 1, SIZE), math.nan)
    rows[torch.arange(DEPTH + 1) <= given.lengths[:, None]] = given.p
    drafts = torch.where(given.beyond, 0, given.drafts)
    parents = torch.where(given.beyond, -2, (torch.arange(DEPTH) - 1).expand(ROWS, -1))
    tree = DraftTree(drafts, parents, torch.full((ROWS,), DEPTH))
    q_rows = torch.nn.functional.pad(torch.arange(ROWS * DEPTH).view(ROWS, DEPTH), (0, 1), value=-1)
    told = (None, None) if way.endswith("without q") else (given.q.flatten(0, 1), q_rows)
    arguments = (rows.flatten(0, 1), tree, *told, given.seeds, given.positions)
    moved = [
        DraftTree(*(part.to(device) for part in one)) if one is tree else one for one in arguments
    ]
    moved = [one.to(device) if isinstance(one, torch.Tensor) else one for one in moved]
    found = verify_tree(*moved, impl=impl).tokens.tolist()
    assert found == tokens_of(way, given, impl, device, junk=-1)


def test_what_is_offered_is_read() -> None:
    """The negative control: the same poison one place earlier is seen."""
    given = make_round()
    clean = tokens_of("chain", given, "torch", torch.device("cpu"), junk=-1)
    shorter = given._replace(lengths=(given.lengths - 1).clamp(min=0))
    broken = poisoned(shorter, -1)._replace(lengths=given.lengths)
    assert tokens_of("chain", broken, "torch", torch.device("cpu"), junk=-1) != clean


RULES: dict[str, Callable[..., Verdict]] = {
    "chain": partial(verify_chain, impl="torch"),
    "chain, triton": partial(verify_chain, impl="triton"),
    "block": partial(verify_block, impl="torch"),
    "block, triton": partial(verify_block, impl="triton"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("more", [1, DEPTH])
def test_rows_of_logits_behind_the_drafts_are_not_read(
    rule: str, more: int, device: torch.device
) -> None:
    """Where the pass was laid out before it was known how much would be drafted."""
    given = make_round()
    sizes = (given.lengths + more).clamp(max=DEPTH)
    places = torch.arange(DEPTH + 1)
    read = (places <= given.lengths[:, None])[places <= sizes[:, None]]
    wide = torch.full((len(read), SIZE), math.nan)
    wide[read] = given.p
    rest = [part.to(device) for part in given[1:]]
    expected = RULES[rule](given.p.to(device), *rest)
    found = RULES[rule](wide.to(device), *rest, sizes=sizes.to(device))
    assert found.accepted.tolist() == expected.accepted.tolist() and found.accepted.any()
    assert found.tokens.tolist() == expected.tokens.tolist()
