"""A captured forward of Triton steps gives what the model gives; its kernels run interpreted on a
CPU."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from draftsmith.drafters.compiled import captured as captured_module
from draftsmith.drafters.compiled import device_rewrite
from draftsmith.drafters.compiled.captured import capture_lm, steps_for
from draftsmith.drafters.heads import feature_head
from draftsmith.drafters.heads.feature_head import FeatureHead
from draftsmith.drafters.options import Eagle1Options, Eagle3Options, MtpOptions, PeagleOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.products.row_steps_triton import normalise
from tests.interpreted import language_patched_once, rounding_to_nearest
from tests.paged_texts import read_two

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "0", reason="kernels are not interpreted here"
)
ARCHITECTURES = ("llama", "qwen3", "gemma", "gemma2", "gpt_neox", "qwen3_moe")
TAPS = (0, 2, FINAL)


@pytest.fixture(scope="module", autouse=True)
def as_on_a_device() -> Iterator[None]:
    with language_patched_once(), rounding_to_nearest():
        yield


def made(folder: str, dtype: torch.dtype, *, captured: bool = True) -> Target:
    target = Target.load(folder, dtype=dtype)
    if captured:
        capture_lm(target, impl="triton")
        assert target.captured
    return target


def everything(target: Target, impl: str = "torch") -> list[torch.Tensor]:
    return read_two(target, ((3, 2), (1, 0), (2, 4)), TAPS, impl).everything


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


# Feature heads


KINDS: dict[str, tuple[str, Any]] = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 fc_norm": ("eagle3", Eagle3Options(fc_norm=True, norm_output=True, window=8)),
    "eagle1": ("eagle1", Eagle1Options()),
    "mtp": ("mtp", MtpOptions()),
    "p-eagle": ("p-eagle", PeagleOptions()),
}


@pytest.fixture
def head(tiny_target: Callable[..., str]) -> Callable[..., Any]:
    def made(kind: str, dtype: torch.dtype, arch: str = "llama") -> Any:
        family, options = KINDS[kind]
        found = FAMILIES[family].create(options, Target.load(tiny_target(arch)), seed=0)
        found._target = Target.load(tiny_target(arch), dtype=dtype)
        generator = torch.Generator().manual_seed(2)
        for parameter in found.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            wide = parameter.ndim > 1
            parameter.data = noise * parameter.shape[-1] ** -0.5 if wide else 1 + 0.1 * noise
        return found.to(dtype).eval()

    return made


def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_head, "steps_for", lambda *given: "triton")


def passes(head: FeatureHead, impl: str = "torch") -> list[torch.Tensor]:
    """States and logits of passes over two texts in blocks out of order, and the pool."""
    dtype = head.head_weight().dtype
    pool = head.new_pool(8, 4, torch.device("cpu"), dtype)
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(8, generator=generator).view(2, 4)
    done, found = [0, 0], []
    for counts in ((3, 2), (1, 0), (2, 4)):
        rows = [row for row in range(2) if counts[row]]
        positions = torch.cat([torch.arange(done[row], done[row] + counts[row]) for row in rows])
        lengths = torch.tensor([counts[row] for row in rows])
        width = len(head.taps) * head.head_weight().shape[1]
        taps = torch.randn(len(positions), width, generator=generator).to(dtype)
        context = PagedPass(pool, tables[rows], positions, lengths, impl=impl)
        embeds = head.embed(positions % 7)
        step = head.read_ragged(embeds, head.fused(taps), context)
        found += [*step, head.draft_logits(step.head_input)]
        done = [one + two for one, two in zip(done, counts)]
    return [*found, *pool.keys, *pool.values]


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_captured_of_triton_steps(
    kind: str, impl: str, head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_cuda(monkeypatch)
    own = head(kind, torch.float32)
    fused = copy.deepcopy(own)
    fused.capture_forward()
    assert fused._captured is not None
    called = {node.target for node in fused._captured.step.graph.nodes}
    assert device_rewrite.attend_rotated in called and device_rewrite.gate in called
    for found, expected in zip(passes(fused, impl), passes(own), strict=True):
        torch.testing.assert_close(found, expected, atol=4e-5, rtol=1e-5)
    for parameter in (*fused.parameters(), *own.parameters()):  # a swap writes in place
        parameter.data.mul_(1.25)
    fused.refresh()
    for found, expected in zip(passes(fused, impl), passes(own), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_rounds_as_the_head_does(
    kind: str, head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_cuda(monkeypatch)
    own = head(kind, torch.bfloat16)
    reference = passes(head(kind, torch.float64))
    fused = copy.deepcopy(own)
    fused.capture_forward()
    assert fused._captured is not None
    errors = [
        sum((one.double() - other).norm().item() for one, other in zip(passes(those), reference))
        for those in (fused, own)
    ]
    assert errors[0] <= 1.05 * errors[1]


def test_a_head_of_another_type_is_left_as_it_is(
    head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_head, "steps_for", lambda *given: None)
    made = head("eagle3", torch.float64)
    made.capture_forward()
    assert made._captured is None
