"""MTP modules for targets whose own kind has one, new or trained further: a block of the target's
class, exported into the target's folder in the place of the old one, or where readers find it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.session import older_drafter
from tests.noise import noisy
from tests.unit.train.export.conftest import APPENDED, export, saved, stitched_tensors
from tests.unrolled import unroll_batch

BESIDE = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "ernie4_5_moe")
IDS = torch.randint(2, 288, (2, 24), generator=torch.Generator().manual_seed(1))
Find = Callable[..., str]


KINDS = [
    kind if kind == "deepseek_v3" else pytest.param(kind, marks=pytest.mark.long)
    for kind in (*APPENDED, *BESIDE)
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_module_has_the_targets_block_and_is_exported_into_its_folder(
    kind: str, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = without_module(kind)
    target = Target.load(folder, dtype=torch.float32)
    drafter = Mtp.create(MtpOptions(), target, seed=3)
    assert isinstance(drafter, AppendedMtp)
    noisy(drafter, 0, 0.1)
    checkpoint.save(drafter, tmp_path / "draft", target)
    out = export(tmp_path / "draft", "vllm")

    weight_map = read_json(out / "model.safetensors.index.json")["weight_map"]
    old = load_file(folder / "model.safetensors")
    new = {name for name, file in weight_map.items() if file == "model-mtp.safetensors"}
    assert weight_map.keys() == old.keys() | new and new.isdisjoint(old)
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    again = Target.load(out, dtype=torch.float32)
    mask = torch.ones_like(IDS)
    assert torch.equal(again.states(IDS, mask, ())[1], target.states(IDS, mask, ())[1])
    if kind != "ernie4_5_moe":  # whose heads vLLM rotates otherwise
        read = checkpoint.load(out, again)
        assert read.state_dict().keys() == drafter.state_dict().keys()
        assert all(
            torch.equal(one, read.state_dict()[name]) for name, one in drafter.state_dict().items()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_module_begins_at_numbers_that_learn(
    kind: str, without_module: Callable[[str], Path]
) -> None:
    target = Target.load(without_module(kind), dtype=torch.float32)
    first, second, other = (Mtp.create(MtpOptions(), target, seed=seed) for seed in (3, 3, 4))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.state_dict()[name])  # nothing is left undrawn
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.state_dict()[name])
            assert 0.1 < float(parameter.detach().std() * parameter.shape[-1] ** 0.5) < 1
    batch = unroll_batch(first, target, IDS, 2)
    head, losses = first.head_weight(), []
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-2)
    for _ in range(12):
        logits = [step.hidden[:, 1:-2] @ head.T for step in first.unroll(batch)]
        loss = sum(
            torch.nn.functional.cross_entropy(one.flatten(0, 1), IDS[:, 3:].flatten())
            for one in logits
        )
        optimizer.zero_grad()
        loss.backward()
        assert all(one.grad is not None for one in first.layer.self_attn.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "ernie4_5_moe", "llama", "qwen3"])
def test_modules_that_sglang_runs_otherwise_are_refused(
    kind: str, tiny_target: Find, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    own = tiny_target(kind) if kind in ("llama", "qwen3") else without_module(kind)
    target = Target.load(own)
    draft = saved("mtp", target, tmp_path / "draft")
    with pytest.raises(UserError, match=f"SGLang runs the MTP module of a '{kind}' target"):
        export(draft, "sglang")


def test_ernies_heads_are_in_the_order_that_vllm_rotates(
    without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scores of two states: pairs rotated here, halves there."""
    target = Target.load(without_module("ernie4_5_moe"), dtype=torch.float32)
    drafter = Mtp.create(MtpOptions(), target, seed=3)
    checkpoint.save(drafter, tmp_path / "draft", target)
    theirs = load_file(export(tmp_path / "draft", "vllm") / "model-mtp.safetensors")
    width = drafter.layer.self_attn.head_dim
    states = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.tensor([5.0, 2.0]), 10_000 ** -torch.linspace(0, 1, width // 2))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def score(q: torch.Tensor, k: torch.Tensor, *, halves: bool) -> torch.Tensor:
        rotated = []
        for weight, state, by in zip((q, k), states, turn):
            heads = (weight @ state).unflatten(
                0, (-1, 2, width // 2) if halves else (-1, width // 2, 2)
            )
            pairs = heads.transpose(1, 2) if halves else heads
            rotated.append(torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by))
        return (rotated[0][: len(rotated[1])] * rotated[1]).sum(dim=(1, 2))

    attention, name = drafter.layer.self_attn, "model.mtp_block.0.self_attn.{}_proj.weight"
    torch.testing.assert_close(
        score(theirs[name.format("q")], theirs[name.format("k")], halves=True),
        score(attention.q_proj.weight, attention.k_proj.weight, halves=False),
    )


def test_another_width_is_refused(without_module: Callable[[str], Path]) -> None:
    target = Target.load(without_module("glm4_moe"))
    with pytest.raises(UserError, match="has a block of the target's own shape; leave it out"):
        Mtp.create(MtpOptions(intermediate_size=8), target, seed=0)


def test_another_targets_module_is_refused(
    without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    target = Target.load(without_module("qwen3_next"))
    draft, other = saved("mtp", target, tmp_path / "draft"), str(without_module("glm4_moe"))
    with pytest.raises(UserError, match="is for a target with model_type='qwen3_next'"):
        export(draft, "vllm", target=other)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_sglang_reads_qwens_modules(
    kind: str, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    target = Target.load(without_module(kind), dtype=torch.float32)
    out = export(saved("mtp", target, tmp_path / "draft"), "sglang")
    card = (out / "README.md").read_text()
    assert f"--model-path {out} --speculative-algorithm NEXTN --speculative-num-steps" in card


MODULE = "model.layers.2."
SHARED = {f"{MODULE}embed_tokens.weight", f"{MODULE}shared_head.head.weight"}


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_new_module_is_where_the_old_one_was(
    native_target: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    folder = native_target(kind)
    target = Target.load(folder)
    drafter = older_drafter(str(folder), "mtp", target)
    checkpoint.save(noisy(drafter, 0, 0.1), tmp_path / "tuned", target)
    out = export(tmp_path / "tuned", "vllm")

    old, tuned = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "tuned" / "model.safetensors"),
    )
    new = stitched_tensors(out)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], tuned.get(name, old[name])) for name in new)
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    assert changed == {
        name
        for name in old.keys() - SHARED
        if name.startswith(MODULE) and "correction_bias" not in name
    }
    assert read_json(out / "config.json") == read_json(folder / "config.json")
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]


def test_another_target_is_refused(native_target: Callable[[str], Path], tmp_path: Path) -> None:
    folder = native_target("glm4_moe")
    target = Target.load(folder)
    checkpoint.save(checkpoint.load(folder, target), tmp_path / "tuned", target)
    other = str(native_target("deepseek_v3"))
    with pytest.raises(UserError, match="give --target the folder that it was trained from"):
        export(tmp_path / "tuned", "vllm", target=other)


def test_a_target_that_vllm_would_route_otherwise_is_refused(
    native_target: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = native_target("deepseek_v3")
    target = Target.load(folder)
    checkpoint.save(checkpoint.load(folder, target), tmp_path / "tuned", target)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    write_json(other / "config.json", read_json(other / "config.json") | {"scoring_func": None})
    with pytest.raises(UserError, match=r"routes as transformers does by .* alone; put these into"):
        export(tmp_path / "tuned", "vllm", target=str(other))
