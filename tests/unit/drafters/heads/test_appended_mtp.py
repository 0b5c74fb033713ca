"""MTP modules that targets bring along as one more decoder layer: read, run and saved
as published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp, rotary_of
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.conftest import merge_json
from tests.first_rounds import first_round
from tests.unrolled import unroll_batch, unrolled_logits

KINDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MODULE = "model.layers.2."
IDS = torch.randint(2, 288, (1, 12), generator=torch.Generator().manual_seed(1))
Find = Callable[[str], Path]


def module_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(MODULE)
    }


def rms_norm(states: torch.Tensor, gains: torch.Tensor, eps: float) -> torch.Tensor:
    return states * (states.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt() * gains


class Written:
    """The module as vLLM's files of that name compute it (`deepseek_mtp.py`, `glm4_moe_mtp.py`),
    around the layer that transformers loaded into the model whose third one it was."""

    def __init__(self, folder: Path, *, feeds_normed: bool):
        self.model = AutoModelForCausalLM.from_pretrained(folder / "whole").eval()
        self.weights = {
            name.removeprefix(MODULE): tensor for name, tensor in module_of(folder).items()
        }
        self.eps, self.feeds_normed = self.model.config.rms_norm_eps, feeds_normed

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T] tokens, each one further than its state [1, T, H] -> what the head reads, what the
        module reads next."""
        positions = torch.arange(tokens.shape[1])[None]
        embeds = torch.where(
            positions[..., None] == 0, 0, self.model.get_input_embeddings()(tokens)
        )
        pair = [
            rms_norm(embeds, self.weights["enorm.weight"], self.eps),
            rms_norm(states, self.weights["hnorm.weight"], self.eps),
        ]
        mixed = torch.cat(pair, dim=-1) @ self.weights["eh_proj.weight"].T
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(mixed, positions)
        raw = self.model.model.layers[2](
            mixed, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        normed = rms_norm(raw, self.weights["shared_head.norm.weight"], self.eps)
        return normed, normed if self.feeds_normed else raw


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(native_target: Find, kind: str) -> Target:
    return Target.load(native_target(kind))


@pytest.fixture(scope="module")
def drafter(native_target: Find, kind: str, target: Target) -> AppendedMtp:
    drafter = checkpoint.load(native_target(kind), target)
    assert isinstance(drafter, AppendedMtp)
    return drafter


def test_two_steps_are_the_published_modules(
    native_target: Find, kind: str, target: Target, drafter: AppendedMtp
) -> None:
    module = Written(native_target(kind), feeds_normed=kind == "deepseek_v3")
    final = target.states(IDS, torch.ones_like(IDS), ())[1]
    batch = unroll_batch(drafter, target, IDS, 2)
    with torch.no_grad():
        first, second = (step.hidden for step in drafter.unroll(batch))
    for anchor in (0, 5, 9):
        true = final[:, : anchor + 1]
        read, fed = module.run(IDS[:, 1 : anchor + 2], true)
        torch.testing.assert_close(first[:, : anchor + 1], read, rtol=1e-4, atol=1e-4)
        read, _ = module.run(IDS[:, 1 : anchor + 3], torch.cat([true, fed[:, -1:]], dim=1))
        torch.testing.assert_close(second[:, anchor + 1], read[:, -1], rtol=1e-4, atol=1e-4)


def test_its_rotary_moves_and_leaves_the_targets_behind(target: Target) -> None:
    new = AppendedMtp.create(MtpOptions(), target, seed=0).to("meta")
    assert new._rotary[0].inv_freq.device.type == "meta"
    assert rotary_of(target).inv_freq.device.type == "cpu"


def test_what_is_drafted_is_what_unrolling_says(target: Target, drafter: AppendedMtp) -> None:
    (text,), greedy = IDS.tolist(), SamplingRows.of([0.0])
    drafted = drafter.propose(first_round(drafter, target, [text], [3], sampling=greedy)).tokens[0]
    found = unrolled_logits(drafter, target, text, drafted.tolist()).argmax(dim=-1)
    assert found.tolist() == drafted.tolist()


def test_saved_as_published(
    native_target: Find, kind: str, target: Target, drafter: AppendedMtp, tmp_path: Path
) -> None:
    checkpoint.save(drafter, tmp_path, target)
    published = module_of(native_target(kind))
    saved = load_file(tmp_path / "model.safetensors")
    assert published.keys() - saved.keys() == {
        f"{MODULE}embed_tokens.weight",
        f"{MODULE}shared_head.head.weight",
    }
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())
    again = checkpoint.load(tmp_path, target, dtype=torch.bfloat16)
    gate = f"{MODULE}mlp.gate."
    assert again.state_dict()["layer.mlp.gate.weight"].dtype == torch.bfloat16
    assert torch.equal(
        again.state_dict()["layer.mlp.gate.e_score_correction_bias"],
        published[f"{gate}e_score_correction_bias"],
    )


def test_a_smaller_model_of_the_kind_is_a_draft_language_model(
    native_target: Find, target: Target, kind: str
) -> None:
    assert checkpoint.load(native_target(kind) / "whole", target).family == "draft-lm"


@pytest.fixture
def folder(native_target: Find, tmp_path: Path) -> Path:
    shutil.copytree(native_target("glm4_moe"), tmp_path / "copy")
    return tmp_path / "copy"


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


EXPERT = f"{MODULE}mlp.experts.1.up_proj.weight"


def in_fp8(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: merge_json(folder / "config.json", {"num_nextn_predict_layers": 2}), "holds no model.layers.3.eh_proj"),
        (lambda folder: with_tensors(folder, lambda one: one.pop(f"{MODULE}eh_proj.weight")), "holds no model.layers.2.eh_proj"),
        (lambda folder: with_tensors(folder, lambda one: one.pop(EXPERT)), "1.up_proj.weight' of the MTP module is missing"),
        (lambda folder: with_tensors(folder, in_fp8), "is stored as FP8 without its"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(
    native_target: Find, folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message):
        checkpoint.load(folder, Target.load(native_target("glm4_moe")))
