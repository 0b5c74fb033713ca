"""The unroll by flex attention is the unroll by blocks and diagonals: texts that share a row,
columns left out, grouped heads."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train import session
from draftsmith.train.config import TrainConfig, UnrollConfig


def unrolled(drafter: torch.nn.Module, batch: dict, *, flex: bool) -> torch.Tensor:
    """[S, B, L, H] of the columns that draft tokens which count, with zeros where nothing is
    drafted."""
    steps = drafter.unroll(UnrollBatch(**batch, num_steps=4, flex=flex))
    return torch.stack([step.hidden * step.valid[..., None] for step in steps])[
        :, :, max(0, batch["first"] - 2) :
    ]


def packed(target: Target, drafter: torch.nn.Module, *, length: int, first: int) -> dict:
    """Two rows of two texts and of one, the last padded."""
    ids = torch.randint(3, 288, (2, length), generator=torch.Generator().manual_seed(0)).to(
        target.device
    )
    segments = torch.zeros_like(ids)
    segments[0, length // 3 :] = 1
    segments[1, length - 5 :] = -1
    mask = (segments >= 0).long()
    taps, _ = target.states(ids, mask, drafter.taps, segments=segments)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "taps": taps.detach(),
        "segments": segments,
        "first": first,
    }


def drafter_of(target: Target) -> torch.nn.Module:
    made = (
        FAMILIES["eagle3"]
        .create(Eagle3Options(), target, seed=0)
        .to(device=target.device, dtype=target.dtype)
    )
    for parameter in made.parameters():
        # Large weights: a pass that ignored part of its keys would otherwise still look right.
        parameter.data += torch.randn_like(parameter) * (
            parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        )
    return made


@pytest.mark.parametrize(("length", "first"), [(40, 0), (150, 17)])
@torch.no_grad()
def test_the_states_are_those_of_blocks_and_diagonals(tiny_target, length, first):
    target = Target.load(tiny_target("llama"), dtype=torch.float64)
    torch.manual_seed(1)
    drafter = drafter_of(target)
    batch = packed(target, drafter, length=length, first=first)
    ours, theirs = (unrolled(drafter, batch, flex=flex) for flex in (True, False))
    torch.testing.assert_close(ours, theirs)
    # Negative control: who may see whom matters here.
    alone = unrolled(drafter, batch | {"segments": torch.zeros_like(batch["segments"])}, flex=True)
    assert float((alone - theirs).abs().max()) > 1e-3


@pytest.mark.gpu
def test_gradients_are_those_of_blocks_and_diagonals(tiny_target):
    target = Target.load(tiny_target("llama"), dtype=torch.float32, device="cuda")
    torch.manual_seed(1)
    drafter, found = drafter_of(target), []
    for length in (300, 150):  # of any length, by one compiled kernel
        batch = packed(target, drafter, length=length, first=17)
        found.append([])
        for flex in (True, False):
            drafter.zero_grad()
            unrolled(drafter, batch, flex=flex).pow(2).mean().backward()
            found[-1].append(
                torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
            )
    for ours, theirs in found:
        # Products of float32 may run as TF32.
        assert float((ours - theirs).norm() / theirs.norm()) < 5e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a CPU is refused")
def test_a_cpu_is_refused(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "load_corpus", lambda *_: None)
    monkeypatch.setattr(session, "warn_of_cut_texts", lambda *_: None)
    unroll = UnrollConfig(flex=True)
    config = TrainConfig(
        family="eagle3", target=tiny_target("llama"), data="D", out=str(tmp_path), unroll=unroll
    )
    with pytest.raises(UserError, match="needs CUDA"):
        session.train(config)
