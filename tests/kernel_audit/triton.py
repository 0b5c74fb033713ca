"""The Triton kernels against the reference that is enumerated: the same drafts, the same streams,
the same decisions.

Triton computes in float32 and draws from its streams, so that no uniform can be chosen for it.
Rounds are taken from the enumeration's drafts with as many seeds as there is time for; a row counts
where logits a little larger or smaller, in the reference's float64, change nothing: there no draw
lies within rounding of its threshold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.serve.audit.report import Check
from tests.kernel_audit.enumerate import all_drafts
from tests.kernel_audit.exact import (
    CHAIN,
    TREES,
    Shape,
    chain_arguments,
    tree_arguments,
)
from tests.kernel_audit.world import Distribution

NUDGE = 1e-5
LEAST_CLEAR = 0.9  # of the rows, for the comparison to say anything

CHOICE = 20  # rounds of which one is compared
CPU = torch.device("cpu")

Verify = Callable[..., tuple[torch.Tensor, ...]]


def triton_checks(
    distributions: tuple[Distribution, ...], seed: int, *, rows: int, device: torch.device
) -> list[Check]:
    """One check a way to verify: `rows` rounds of each distribution decided by Triton and by the
    reference."""
    ways: dict[str, tuple[Verify, Shape]] = {
        "chain": (verify_chain, CHAIN),
        "block": (verify_block, CHAIN),
    }
    ways |= {name: (verify_tree, shape) for name, shape in TREES.items()}
    return [
        _check(way, verify, shape, distributions, seed, rows, device)
        for way, (verify, shape) in ways.items()
    ]


def _check(
    way: str,
    verify: Verify,
    shape: Shape,
    distributions: tuple[Distribution, ...],
    seed: int,
    rows: int,
    device: torch.device,
) -> Check:
    counts = torch.zeros(3, dtype=torch.int64)
    for distribution in distributions:
        counts += torch.tensor(disagreements(verify, shape, distribution, seed, rows, device))
    asked, clear, differing = counts.tolist()
    said = (
        f"{differing} of {clear} rounds decided otherwise; {asked - clear} within rounding of a "
        "threshold left out"
    )
    passed = differing == 0 and clear >= LEAST_CLEAR * asked
    evidence = {"rounds": asked, "compared": clear, "differing": differing}
    return Check(
        name=f"triton decides as the reference, {way}",
        kind="check",
        passed=passed,
        said=said,
        evidence=evidence,
    )


def disagreements(
    verify: Verify,
    shape: Shape,
    distribution: Distribution,
    seed: int,
    rows: int,
    device: torch.device,
) -> tuple[int, int, int]:
    """(rounds, rounds not within rounding of a threshold, rounds of these that Triton decides
    otherwise)."""
    world = shape.world(distribution, seed)
    drafts = all_drafts(world, shape.parents, deterministic=distribution.deterministic)
    # Drafts by their chances, and of many seeds those that differ most in what is kept and emitted.
    generator = torch.Generator().manual_seed(seed)
    picked = torch.multinomial(drafts.chances, rows * CHOICE, replacement=True, generator=generator)
    build = tree_arguments if verify is verify_tree else chain_arguments
    seeds = torch.arange(len(picked))
    chosen = _unlike(
        _outcomes(
            verify, build(world, drafts, picked, seeds, deterministic=distribution.deterministic)
        ),
        rows,
    )
    arguments = build(
        world, drafts, picked[chosen], seeds[chosen], deterministic=distribution.deterministic
    )
    reference = _outcomes(verify, arguments)
    clear = torch.ones(rows, dtype=torch.bool)
    for factor in (1 - NUDGE, 1 + NUDGE):
        clear &= (_outcomes(verify, _scaled(arguments, factor)) == reference).all(dim=1)
    ours = _outcomes(verify, _scaled(arguments, 1.0, torch.float32), impl="triton", device=device)
    return rows, int(clear.sum()), int((ours != reference).any(dim=1)[clear].sum())


def _unlike(outcomes: torch.Tensor, count: int) -> torch.Tensor:
    """[count] rows, so that no outcome comes a second time before every other one has come once."""
    _, groups = torch.unique(outcomes, dim=0, return_inverse=True)
    order = groups.argsort(stable=True)
    sizes = torch.bincount(groups)
    ranks = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[groups[order]]
    return order[ranks.argsort(stable=True)[:count]]


def _outcomes(
    verify: Verify,
    arguments: tuple[object, ...],
    *,
    impl: str = "torch",
    device: torch.device = CPU,
) -> torch.Tensor:
    """[B, ...]: all that each row's verification gives."""
    verdict = verify(*(_moved(argument, device) for argument in arguments), impl=impl)
    return torch.cat([tensor.cpu().view(len(verdict[0]), -1) for tensor in verdict], dim=1)


def _moved(argument: object, device: torch.device) -> object:
    if isinstance(argument, DraftTree):
        return DraftTree(*(tensor.to(device) for tensor in argument))
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


def _scaled(
    arguments: tuple[object, ...], factor: float, dtype: torch.dtype = torch.float64
) -> tuple[object, ...]:
    """The logits among the arguments times `factor`."""
    return tuple(
        (argument * factor).to(dtype)
        if isinstance(argument, torch.Tensor) and argument.is_floating_point()
        else argument
        for argument in arguments
    )
