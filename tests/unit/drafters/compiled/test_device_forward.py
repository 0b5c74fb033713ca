"""A captured forward of Triton steps gives what the model gives; its kernels run interpreted on a
CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from draftsmith.drafters.compiled import captured as captured_module
from draftsmith.drafters.compiled import device_rewrite
from draftsmith.drafters.compiled.captured import capture_lm, steps_for
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.products.row_steps_triton import normalise
from tests.interpreted import members_looked_up_once, rounding_to_nearest

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "0", reason="kernels are not interpreted here"
)
ARCHITECTURES = ("llama", "qwen3", "gemma", "gemma2", "gpt_neox", "qwen3_moe")
TAPS = (0, 2, FINAL)


@pytest.fixture(scope="module", autouse=True)
def as_on_a_device() -> Iterator[None]:
    with members_looked_up_once(), rounding_to_nearest():
        yield


def made(folder: str, dtype: torch.dtype, *, captured: bool = True) -> Target:
    target = Target.load(folder, dtype=dtype)
    if captured:
        capture_lm(target, impl="triton")
        assert target.captured
    return target


def passes(target: Target, impl: str) -> tuple[list[torch.Tensor], PagedPool]:
    """Logits and taps of passes over two texts in blocks out of order, and the pool."""
    pool = target.new_pool(num_blocks=8, block_size=4)
    tables = torch.randperm(8, generator=torch.Generator().manual_seed(1)).view(2, 4)
    texts = torch.randint(3, target.vocab_size, (2, 16), generator=torch.Generator().manual_seed(2))
    done, found = [0, 0], []
    for counts in ((3, 2), (1, 0), (2, 4)):
        rows = [row for row in range(2) if counts[row]]
        parts = [torch.arange(done[row], done[row] + counts[row]) for row in rows]
        ids = torch.cat([texts[row, part] for row, part in zip(rows, parts)])
        lengths, positions = torch.tensor([len(part) for part in parts]), torch.cat(parts)
        context = PagedPass(pool, tables[rows], positions, lengths, impl=impl)
        output = target.forward(ids[None], positions[None], context, torch.arange(len(ids)), TAPS)
        found += [output.logits, output.taps]
        done = [one + two for one, two in zip(done, counts)]
    return found, pool


def everything(target: Target, impl: str = "torch") -> list[torch.Tensor]:
    found, pool = passes(target, impl)
    return [*found, *pool.keys, *pool.values]


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_families_are_captured_of_triton_steps(tiny_target, arch: str) -> None:
    folder = tiny_target(arch)
    own = everything(made(folder, torch.float32, captured=False))
    for found, expected in zip(everything(made(folder, torch.float32)), own, strict=True):
        # Logits are a few units large; float32 sums in another order add up to 1e-5 of that.
        torch.testing.assert_close(found, expected, atol=4e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
        ("qwen3", torch.bfloat16),
        ("gemma", torch.bfloat16),
    ],
)
def test_half_precision_rounds_where_the_model_does(tiny_target, arch, dtype) -> None:
    folder = tiny_target(arch)
    reference = everything(made(folder, torch.float64, captured=False))
    own = everything(made(folder, dtype, captured=False))
    found = everything(made(folder, dtype))
    equal = sum(int((one == other).sum()) for one, other in zip(found, own, strict=True))
    assert equal / sum(one.numel() for one in own) > 0.98
    errors = [
        sum((one.double() - other).norm().item() for one, other in zip(those, reference))
        for those in (found, own)
    ]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.long
def test_other_contexts_are_given_rotated_keys(tiny_target) -> None:
    """The C++ kernel of a CPU writes keys itself, as a context of the learner may."""
    target = made(tiny_target("qwen3"), torch.float32)
    for found, expected in zip(everything(target, "auto"), everything(target), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_step_is_not_used_and_said_once(tiny_target, monkeypatch, caplog) -> None:
    def wrong(*arguments):
        return 1.1 * normalise(*arguments)

    monkeypatch.setattr(device_rewrite, "normalise", wrong)
    monkeypatch.setattr(device_rewrite, "fuse_sums", lambda graph: None)
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger=captured_module.__name__):
        capture_lm(target, impl="triton")
    assert not target.captured
    assert len(caplog.records) == 1 and "differs from the model's own" in caplog.text


def test_the_device_decides_what_a_forward_is_made_of() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert steps_for(cuda, torch.bfloat16) == "triton"
    assert steps_for(cuda, torch.float64) is None
    assert steps_for(cpu, torch.bfloat16) == "cpu"


@torch.no_grad()
def test_no_weight_is_held_twice_and_those_written_in_place_count_at_once(tiny_target) -> None:
    target = made(tiny_target("llama"), torch.float32)
    parameters = dict(target.model.named_parameters())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in parameters.values()}  # fmt: skip
    assert sum(storages.values()) == 4 * sum(one.numel() for one in parameters.values())
    joined = target._captured.body._packed
    assert len(joined) == 2 * target.num_layers
    assert {one._weight.untyped_storage().data_ptr() for one in joined} <= set(storages)
    for parameter in target.model.model.layers.parameters():
        parameter.mul_(1.25)
    found = everything(target)
    with target.own_forward():
        own = everything(target)
    for one, other in zip(found, own, strict=True):
        torch.testing.assert_close(one, other, atol=4e-5, rtol=1e-5)
