"""A feature head of Triton steps gives what its own forward gives; the kernels run interpreted on a
CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from draftsmith.drafters.compiled import device_rewrite
from draftsmith.drafters.heads import feature_head
from draftsmith.drafters.heads.feature_head import FeatureHead
from draftsmith.drafters.options import Eagle1Options, Eagle3Options, MtpOptions, PeagleOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.paged import PagedPass
from tests.interpreted import members_looked_up_once, rounding_to_nearest

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "0", reason="kernels are not interpreted here"
)
KINDS: dict[str, tuple[str, Any]] = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 fc_norm": ("eagle3", Eagle3Options(fc_norm=True, norm_output=True, window=8)),
    "eagle1": ("eagle1", Eagle1Options()),
    "mtp": ("mtp", MtpOptions()),
    "p-eagle": ("p-eagle", PeagleOptions()),
}


@pytest.fixture(scope="module", autouse=True)
def as_on_a_device() -> Iterator[None]:
    with members_looked_up_once(), rounding_to_nearest():
        yield


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
