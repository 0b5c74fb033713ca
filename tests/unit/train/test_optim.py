"""The two optimizers in one: who trains what, one schedule for both, and a state that
comes back. The schedule, by steps and by time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import spawn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from draftsmith.drafters.target.sharded import leave_group
from draftsmith.errors import UserError
from draftsmith.train.config import OptimConfig
from draftsmith.train.optim import (
    Clock,
    DraftMuon,
    MuonWithAdamW,
    lr_factor,
    muon_with_adamw,
    orthogonal,
)

TOKENS = 12


def draft(seed: int = 0) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    parts = {
        "layer": torch.nn.Linear(6, 8),
        "norm": torch.nn.LayerNorm(8),
        "lm_head": torch.nn.Linear(8, TOKENS, bias=False),
    }
    return torch.nn.ModuleDict(parts)


def optimizer(module: torch.nn.Module) -> MuonWithAdamW:
    return muon_with_adamw(module, num_tokens=TOKENS, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def train(module: torch.nn.ModuleDict, both: MuonWithAdamW, steps: range) -> None:
    for step in steps:
        rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        both.zero_grad()
        module["lm_head"](module["norm"](module["layer"](rows))).square().mean().backward()
        both.step()


def test_matrices_of_layers_are_muons_and_all_else_is_adamws():
    module = draft()
    module["layer"].bias.requires_grad_(False)
    muon, adamw = optimizer(module).parts
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    both = (*muon.param_groups, *adamw.param_groups)
    groups = [[id(one) for one in group["params"]] for group in both]
    norm, layer, head = module["norm"], module["layer"].weight, module["lm_head"].weight
    assert groups == [[id(layer)], [id(head)], [id(norm.weight), id(norm.bias)]]
    assert [group["weight_decay"] for group in both] == [0.1, 0.1, 0.0]


def test_one_schedule_moves_both_learning_rates():
    module = draft()
    both = optimizer(module)
    schedule = LambdaLR(both, lambda step: 1.0 / (1 + step))
    train(module, both, range(1))
    schedule.step()
    assert [group["lr"] for part in both.parts for group in part.param_groups] == [5e-3] * 3


def test_a_draft_without_a_matrix_is_refused():
    with pytest.raises(UserError, match=r"'muon', but the draft holds no matrix"):
        optimizer(draft()["norm"])


@pytest.mark.parametrize("shape", [(24, 9), (9, 24), (16, 16)])
def test_updates_are_those_of_torch_without_its_rounding(shape: tuple[int, int]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    options = {"lr": 1.0, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    steps = DraftMuon([ours], **options), Muon([theirs], **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for one in steps:
            one.step()
    # bfloat16 has 8 bits.
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def train_as(rank: int, processes: int, folder: str) -> None:
    """Three steps as one of several processes; what it has then lies in a file."""
    store = dist.FileStore(f"{folder}/store-{processes}", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    module = draft()
    # A tall matrix, a wide one and a square one.
    module["wide"], module["square"] = torch.nn.Linear(8, 6), torch.nn.Linear(8, 8)
    both = muon_with_adamw(
        module, num_tokens=TOKENS, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1,
        rank=rank, processes=processes,
    )  # fmt: skip
    for step in range(3):
        for number, one in enumerate(module.parameters()):
            seed = torch.Generator().manual_seed(10 * step + number)
            one.grad = torch.randn(one.shape, generator=seed)
        both.step()
    torch.save(module.state_dict(), f"{folder}/{rank}-of-{processes}.pt")
    leave_group()


def test_processes_that_share_the_updates_end_as_one_does(tmp_path: Path) -> None:
    for processes in (1, 2):
        spawn(train_as, (processes, str(tmp_path)), processes)
    alone, *shared = (
        torch.load(tmp_path / name) for name in ("0-of-1.pt", "0-of-2.pt", "1-of-2.pt")
    )
    for one in shared:
        assert all(torch.equal(one[name], alone[name]) for name in alone)


@given(shape=st.tuples(st.integers(2, 20), st.integers(2, 20)), seed=st.integers(0, 99))
def test_an_update_keeps_its_directions_at_about_one_length(
    shape: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, min(shape), generator=generator)).Q for size in shape
    )
    sizes = 0.1 + torch.rand(min(shape), generator=generator)
    coefficients = Muon([torch.nn.Parameter(left)]).defaults["ns_coefficients"]
    found = orthogonal(left * sizes @ right.T, coefficients)
    kept = left.T @ found @ right
    lengths = kept.diagonal()
    assert ((lengths > 0.6) & (lengths < 1.3)).all()
    assert (kept - lengths.diag()).abs().max() < 1e-3


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_warms_up_and_comes_down_to_final(schedule):
    config = OptimConfig(warmup=0.1, schedule=schedule, final=0.2)
    factors = [lr_factor(config, share / 100) for share in range(101)]
    assert factors[0] == pytest.approx(0.01) and factors[5] == pytest.approx(0.5)
    assert factors[10] == pytest.approx(1.0) and factors[-1] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.6)


def test_constant_stays_at_the_peak_and_no_warmup_is_no_warmup():
    assert lr_factor(OptimConfig(schedule="constant", warmup=0.0), 0.0) == 1.0
    assert lr_factor(OptimConfig(schedule="constant"), 1.0) == 1.0


def test_time_or_steps_whichever_is_further():
    clock = Clock(total_steps=100, budget_s=50.0)
    clock.elapsed_s = 40.0
    assert clock.share_done(10) == pytest.approx(0.8)
    assert clock.share_done(90) == pytest.approx(0.9)
    assert not clock.out_of_time()
    clock.elapsed_s = 60.0
    assert clock.share_done(0) == 1.0 and clock.out_of_time()


def test_a_resumed_clock_goes_on_from_what_was_spent():
    clock = Clock(total_steps=100, budget_s=50.0)
    clock.start(elapsed_s=30.0)
    time.sleep(0.02)
    assert 30.02 <= clock.tick() < 31.0


def test_without_a_budget_time_does_not_count():
    clock = Clock(total_steps=100, budget_s=None)
    clock.elapsed_s = 1e9
    assert clock.share_done(1) == pytest.approx(0.01) and not clock.out_of_time()
