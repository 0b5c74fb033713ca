"""Other engines' published test vectors as data, on every way to verify, and corner cases that none
of them has.

Sources: vLLM (tests/v1/sample/test_rejection_sampler.py, tests/v1/spec_decode/), SGLang
(test_speculative_sampling.py), flashinfer (docstring of chain_speculative_sampling); Apache-2.0.
Vectors of features that are not lossless have no counterpart here: SGLang's acceptance thresholds
below 1, vLLM's synthetic acceptance rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.residual import accepts
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, Verdict
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.state import SamplingState
from tests.adjusting import apply, chain_prefixes
from tests.draft_trees import verify_as_tree

Verify = Callable[..., Verdict]


WAYS = {"chain": verify_chain, "block": verify_block, "tree": verify_as_tree}


# Triton decides as the reference in each way (verify/); one of them is enough here.
@pytest.fixture(params=[*((way, "torch") for way in WAYS), ("tree", "triton")], ids="-".join)
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    way, impl = request.param

    def on_device(*arguments: torch.Tensor | None) -> Verdict:
        moved = (None if argument is None else argument.to(device) for argument in arguments)
        accepted, tokens = WAYS[way](*moved, impl=impl)[:2]
        return Verdict(accepted.cpu(), tokens.cpu())

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return process(logits, SamplingRows.of([0.0] * len(logits)))


def peaked(tokens: list[int], size: int = 20) -> torch.Tensor:
    logits = torch.full((len(tokens), size), -100.0)
    logits[range(len(tokens)), tokens] = 100.0
    return logits


def padded(rows: list[list[int]], width: int) -> torch.Tensor:
    return ids(*(row + [-1] * (width - len(row)) for row in rows)).view(len(rows), width)


VLLM_GREEDY = {
    "perfect match": ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    "early mismatch": ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    "multiple sequences": ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, -1]]),
    "single token": ([[1]], [[1, 2]], [[1, 2]]),
    "empty sequence": ([[]], [[5]], [[5]]),
    "multiple mismatches": (
        [[1, 2, 3], [4, 5, 6]],
        [[1, 2, 7, 6], [4, 8, 6, 9]],
        [[1, 2, 7, -1], [4, 8, -1, -1]],
    ),
}


@pytest.mark.parametrize("drafts, target, expected", VLLM_GREEDY.values(), ids=VLLM_GREEDY.keys())
def test_vllm_greedy(
    verify: Verify, drafts: list[list[int]], target: list[list[int]], expected: list[list[int]]
) -> None:
    width = max(len(draft) for draft in drafts)
    lengths = ids(*(len(draft) for draft in drafts))
    p = greedy(peaked([token for row in target for token in row]))
    rows = torch.arange(len(drafts))
    assert verify(p, padded(drafts, width), lengths, None, rows, rows).tokens.tolist() == expected


def test_vllm_penalties(verify: Verify) -> None:
    """Every position prefers its token (100) to token 15 (99); the frequency penalty counts the
    drafted tokens before it."""
    drafts, target = [[1, 1, 1], [], [1, 1, 1]], [[1, 1, 1, 1], [7], [1, 1, 1, 1]]
    logits = torch.full((9, 20), -100.0)
    logits[range(9), [token for row in target for token in row]] = 100.0
    logits[:, 15] = 99.0
    states = []
    for tokens, penalty in (([5, 6, 2], 1.5), ([6, 3], 1.5), ([7, 4], 0.7)):
        params = SamplingParams(frequency_penalty=penalty, temperature=0.0)
        state = SamplingState(
            params,
            num_prompt=len(tokens) - 1,
            vocab_size=20,
            eos_token_ids=(),
            device=torch.device("cpu"),
        )
        state.follow(tokens)
        states.append(state)
    p = greedy(apply(Adjustments(states), logits, *chain_prefixes(*drafts)))
    verdict = verify(p, padded(drafts, 3), ids(3, 0, 3), None, ids(0, 1, 2), ids(3, 2, 2))
    assert verdict.tokens.tolist() == [[1, 15, -1, -1], [7, -1, -1, -1], [1, 1, 15, -1]]


SGLANG_NODES = {
    # Their candidate 0 is the last committed token. Nodes in the order of their tests: [candidate,
    # parent node].
    "first": [(1, -1), (3, -1), (2, 0), (4, 1), (5, 3)],
    "second": [(4, -1), (1, -1), (5, 0), (2, 1), (3, 3)],
}
SGLANG_CANDIDATES = {"first": [0, 1, 2, 3, 4, 5], "second": [7, 8, 9, 10, 11, 12]}
SGLANG_PEAKS = {"first": {0: 3, 3: 4, 4: 5}, "second": {0: 11, 4: 12}}


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("temperature", [0.01, 0.0])
def test_sglang_tree(
    impl: str, temperature: float, device: torch.device, poisoned_empty: None
) -> None:
    """Thresholds 1: predicted 3 4 5 18 and 11 12 18, along their candidates 0 3 4 5 and 0 4 5."""
    logits, tokens, parents = [], [], []
    for name, nodes in SGLANG_NODES.items():
        for candidate in (0, *(candidate for candidate, _ in nodes)):
            row = torch.ones(20)
            row[SGLANG_PEAKS[name].get(candidate, 18)] = 10
            logits.append(row)
        tokens.append([SGLANG_CANDIDATES[name][candidate] for candidate, _ in nodes])
        parents.append([parent for _, parent in nodes])
    p = process(torch.stack(logits), SamplingRows.of([temperature] * len(logits)))
    tree = DraftTree(ids(*tokens).to(device), ids(*parents).to(device), ids(5, 5).to(device))
    verdict = verify_tree(
        p.to(device), tree, None, None, ids(0, 1).to(device), ids(1, 8).to(device), impl=impl
    )
    assert verdict.accepted.tolist() == [3, 2]
    assert verdict.tokens.tolist() == [[3, 4, 5, 18, -1, -1], [11, 12, 18, -1, -1, -1]]
    along = [
        [nodes[node][0] for node in path if node >= 0]
        for nodes, path in zip(SGLANG_NODES.values(), verdict.nodes.tolist())
    ]
    assert along == [[3, 4, 5], [4, 5]]


def test_flashinfer_docstring(verify: Verify) -> None:
    """p / q is 2 at the first token, so it stays; p is 0 at the second one and the residual is
    token 0 alone."""
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]]).log()
    target = torch.tensor([[0, 0.1, 0.6, 0.3], [1, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]]).log()
    for seed in range(4):
        assert verify(target, ids([2, 1]), ids(2), draft, ids(seed), ids(0)).tokens.tolist() == [
            [2, 0, -1]
        ]


# Corner cases no suite has


def test_u_of_zero_keeps_nothing_impossible() -> None:
    """u is never 0 by construction; were it, a token without mass in p or q would still be
    rejected."""
    nothing, some = torch.tensor([-math.inf]).double(), torch.tensor([-1.0]).double()
    assert (
        not accepts(nothing, nothing, some)
        and not accepts(nothing, some, nothing)
        and not accepts(nothing, nothing, nothing)
    )
    assert accepts(nothing, some, some)


def test_all_but_one_masked(verify: Verify) -> None:
    """V = 4099 is no multiple of any block."""
    size = 4099
    p = torch.full((3, size), -math.inf)
    p[0, 4097], p[1, 11], p[2, 4098] = -7.0, 3.0, 0.0
    q = torch.zeros(1, 2, size)
    assert verify(p, ids([4097, 12]), ids(2), q, ids(1), ids(0)).tokens.tolist()[0] in (
        [4097, 11, -1],
        [4097, 11, 4098],
    )
    assert verify(p, ids([4097, 11]), ids(2), None, ids(1), ids(0)).tokens.tolist() == [
        [4097, 11, 4098]
    ]
    assert verify(p, ids([5, 11]), ids(2), None, ids(1), ids(0)).tokens.tolist() == [[4097, -1, -1]]
