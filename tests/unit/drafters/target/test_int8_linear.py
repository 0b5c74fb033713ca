"""A target with weights of 8 bits: what it computes, what it holds, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.drafters import checkpoint
from draftsmith.drafters.compiled.captured import TOLERANCE, capture_lm
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target import int8_linear as module
from draftsmith.drafters.target import target as target_module
from draftsmith.drafters.target.device import load_target, placement_of
from draftsmith.drafters.target.int8_linear import Int8Linear, make_int8
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.packed_pass import PackedPass
from draftsmith.drafters.target.quantised import effective_weight
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.products.int8_rows import available
from draftsmith.train import session
from draftsmith.train.config import TrainConfig
from draftsmith.train.objective.outline import load_outline

needs_compiler = pytest.mark.skipif(not available(), reason="there is no C++ compiler")
ARCHITECTURES = ["llama", "qwen3", "gemma", "gpt_neox"]
IDS = torch.arange(5, 45)[None]


@pytest.fixture
def wide_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "states_dtype", lambda: torch.float32)


def logits(target: Target, ids: torch.Tensor = IDS) -> torch.Tensor:
    size = ids.shape[1]
    context = PackedPass(torch.zeros(1, size, dtype=torch.int64))
    return target.head(target.paged(ids, torch.arange(size)[None], context).final)


def with_numbers(folder: str, target: Target) -> nn.Module:
    """The plain model, in float64, with the numbers that the target's codes stand for."""
    plain = load_model(folder, trust_remote_code=False, dtype=torch.float64)
    for name, part in target.model.named_modules():
        if isinstance(part, Int8Linear):
            weight = effective_weight(part, like=torch.empty(0, dtype=part.dtype))
            # Not copied in: the input embedding of a tied head stays as it was.
            plain.get_submodule(name).weight = nn.Parameter(weight.double())
    return plain


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_logits_are_those_of_the_numbers_that_codes_stand_for(
    arch: str, tiny_target: Callable[..., str], wide_states: None
) -> None:
    folder = tiny_target(arch)
    target = Target.load(folder, dtype=torch.int8)
    exact = with_numbers(folder, target)(input_ids=IDS, use_cache=False).logits
    found = logits(target)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    plain = load_model(folder, trust_remote_code=False, dtype=torch.float64)
    rounded = (plain(input_ids=IDS, use_cache=False).logits - exact).abs().max()
    assert rounded > 100 * (found.double() - exact).abs().max()  # the control: they differ


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_captured_forward_reads_the_same_codes(
    dtype: torch.dtype, tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "states_dtype", lambda: dtype)
    target = Target.load(tiny_target("llama"), dtype=torch.int8)
    own = {count: logits(target, IDS[:, :count]) for count in (1, 5, 40)}
    capture_lm(target)
    assert target.captured
    # Joined: query, key and value; gate and up; and none of them by its own operation any more.
    graph = str(target._captured.body.graph)  # type: ignore[union-attr]
    assert "int8_linear" not in graph
    assert target._captured.body._one_call is not None  # type: ignore[union-attr]
    for count, expected in own.items():
        apart = (logits(target, IDS[:, :count]) - expected).float().norm(dim=-1)
        assert (apart <= TOLERANCE[dtype] * expected.float().norm(dim=-1)).all()


@needs_compiler
def test_linear_layers_take_half_of_bfloat16(tiny_target: Callable[..., str]) -> None:
    model = load_model(tiny_target("llama"), trust_remote_code=False, dtype=torch.bfloat16)
    wide = nn.Sequential(*(nn.Linear(480, 480, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    before = sum(own.numel() * own.element_size() for own in wide.parameters())
    make_int8(wide, "three layers")
    after = sum(own.numel() * own.element_size() for own in wide.parameters())
    assert all(type(part) is Int8Linear for part in wide)
    assert after == before / 2 + 3 * 480 * 4  # and a scale for each output
    tied = model.get_input_embeddings().weight
    copied = tied.detach().clone()
    make_int8(model, "llama")
    assert torch.equal(model.get_input_embeddings().weight, copied)
    assert not [part for part in model.modules() if type(part) is nn.Linear]


@needs_compiler
def test_a_layer_that_stands_twice_stays_one() -> None:
    layer = nn.Linear(8, 8)
    both = nn.Sequential(layer, nn.ReLU(), layer)
    make_int8(both, "twice")
    assert both[0] is both[2] and type(both[0]) is Int8Linear


@needs_compiler
def test_its_revision_is_its_own_and_drafts_of_the_loaded_weights_fit(
    tiny_target: Callable[..., str],
) -> None:
    folder = tiny_target("llama")
    target, plain = Target.load(folder, dtype=torch.int8), Target.load(folder)
    assert target.revision != plain.revision
    assert target.loaded_revision == plain.revision == plain.loaded_revision
    assert len(target.revision) == 16 and int(target.revision, 16)
    assert target.revision == Target.load(folder, dtype=torch.int8).revision
    outline = load_outline(folder, dtype="int8", trust_remote_code=False)
    assert outline.revision == target.revision
    assert load_outline(folder, trust_remote_code=False).revision == plain.revision


@needs_compiler
def test_every_command_loads_it_by_name(
    tiny_target: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_target("llama")
    target = load_target(folder, dtype="int8", device="cpu", trust_remote_code=False)
    assert any(type(part) is Int8Linear for part in target.model.modules())
    config = TrainConfig(
        family="eagle3", target=folder, target_dtype="int8", out="unused", data=("unused",)
    )
    trained_for = session.open_target(config, placement_of("float32"))
    assert trained_for.revision == target.revision
    # A draft of the weights as they were loaded fits; one of another target's does not.
    for seed, fits in ((0, True), (3, False)):
        other = Target.load(tiny_target("llama", seed))
        draft = Eagle3.create(Eagle3Options(), other, seed=1)
        checkpoint.save(draft, tmp_path / str(seed), other)
        caplog.clear()
        checkpoint.load(str(tmp_path / str(seed)), target)
        assert ("other weights" not in caplog.text) is fits


@needs_compiler
def test_a_pass_reads_codes_and_drafts_read_the_heads_numbers(
    tiny_target: Callable[..., str], wide_states: None
) -> None:
    folder = tiny_target("llama")
    target, plain = Target.load(folder, dtype=torch.int8), Target.load(folder)
    assert target.pass_bytes() < plain.pass_bytes()
    assert target._table is None  # made when a draft asks for it
    head = target.output_weight
    assert head.shape == plain.output_weight.shape
    torch.testing.assert_close(head, plain.output_weight.float(), rtol=0, atol=0.02)
    assert not torch.equal(head, plain.output_weight.float())


@needs_compiler
def test_states_of_another_type_are_refused() -> None:
    layer = Int8Linear(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"codes are for torch\.float32"):
        layer(torch.ones(1, 8, dtype=torch.bfloat16))


def test_where_it_cannot_be_had_it_is_refused(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_target("llama")
    with pytest.raises(UserError, match="the device is 'cuda:0'; use a checkpoint that torchao"):
        Target.load(folder, dtype=torch.int8, device="cuda:0")
    with pytest.raises(UserError, match="tensor_parallel is 2"):
        Target.load(folder, dtype=torch.int8, shards=2)
    monkeypatch.setattr(target_module, "quantisation", lambda config: "bitsandbytes")
    if available():
        with pytest.raises(UserError, match="'bitsandbytes' has quantised already"):
            Target.load(folder, dtype=torch.int8)
        with pytest.raises(UserError, match="no plain linear layers"):
            make_int8(nn.Sequential(nn.ReLU()), "none")
    monkeypatch.setattr(module, "available", lambda: False)
    with pytest.raises(UserError, match="there is no C\\+\\+ compiler here"):
        Target.load(folder, dtype=torch.int8)
