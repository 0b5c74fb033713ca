"""Stitched MTP: the folder is still the target, and the module read as vLLM reads it is still our
module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp import LlamaMtp, Mtp
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.errors import UserError
from draftsmith.train.session import older_drafter
from tests.noise import noisy
from tests.unit.train.export.conftest import export, stitched_tensors
from tests.unrolled import unroll_batch


class MimoModule(torch.nn.Module):
    """What vLLM builds from `model.mtp_layers.0.*` (mimo_mtp.py), over transformers'
    Qwen2 layer."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.mtp_block = Qwen2DecoderLayer(config, layer_idx=0)
        self.final_layernorm = Qwen2RMSNorm(size, eps)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        block = re.compile(r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.")
        names = {
            name.removeprefix("model.mtp_layers.0."): tensor
            for name, tensor in tensors.items()
            if "mtp_layers" in name
        }
        self.load_state_dict(
            {block.sub(r"mtp_block.\1.", name): tensor for name, tensor in names.items()}
        )

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Qwen2RotaryEmbedding
    ) -> torch.Tensor:
        positions = torch.arange(embeds.shape[1])[None]
        embeds = torch.where(positions[..., None] == 0, 0, embeds)
        mixed = self.input_proj(
            torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        )
        mask = torch.full((embeds.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        state = self.mtp_block(
            mixed, attention_mask=mask, position_embeddings=rotary(mixed, positions)
        )
        return self.final_layernorm(state)


@pytest.fixture
def exported(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> Callable[..., tuple[Target, LlamaMtp, Path]]:
    def make(
        arch: str = "llama", options: MtpOptions | None = None
    ) -> tuple[Target, LlamaMtp, Path]:
        target = Target.load(tiny_target(arch))
        drafter = Mtp.create(options or MtpOptions(), target, seed=3)
        checkpoint.save(noisy(drafter, 0), tmp_path / "draft", target)
        return target, drafter, export(tmp_path / "draft", "vllm")

    return make


IDS = torch.randint(2, 288, (1, 12), generator=torch.Generator().manual_seed(1))


def test_transformers_still_loads_the_target(
    exported: Callable[..., tuple[Target, LlamaMtp, Path]],
) -> None:
    target, _, folder = exported()
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    assert not info["missing_keys"]
    with torch.no_grad():
        expected = target.head(target.states(IDS, torch.ones_like(IDS), ())[1])
        torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == target.tokenizer().get_vocab()


def check_module(
    target: Target, drafter: LlamaMtp, folder: Path, tensors: dict[str, torch.Tensor], layer: int
) -> None:
    """vLLM's module, handed the states at `layer`, gives what ours gives of those that it reads."""
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["MiMoForCausalLM"]
    assert values["num_nextn_predict_layers"] == 1
    outside = ("architectures", "model_type", "head_dim")
    config = Qwen2Config(**{key: value for key, value in values.items() if key not in outside})
    config._attn_implementation = "eager"
    module = MimoModule(config).eval()
    module.load(tensors)
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        states = target.states(IDS, mask, (layer,))[0]
        theirs = module(target.embed(torch.roll(IDS, -1, 1)), states, Qwen2RotaryEmbedding(config))
        ours = next(iter(drafter.unroll(unroll_batch(drafter, target, IDS, 1)))).hidden
    torch.testing.assert_close(theirs[:, :-1], ours[:, :-1], rtol=1e-4, atol=1e-4)


def test_vllm_reads_the_module_that_was_trained(
    exported: Callable[..., tuple[Target, LlamaMtp, Path]],
) -> None:
    target, drafter, folder = exported()
    # MiMo hands its module the target's state before the last norm, raw id L.
    check_module(target, drafter, folder, stitched_tensors(folder), target.num_layers)


@pytest.mark.parametrize("biased", [False, True])
def test_a_targets_own_module_is_a_draft_that_can_be_trained_further(
    exported: Callable[..., tuple[Target, LlamaMtp, Path]], biased: bool, tmp_path: Path
) -> None:
    _, drafter, folder = exported()
    if biased:  # as published ones are
        stitched = load_file(folder / "model-mtp.safetensors")
        for name in stitched:
            if name.endswith("_proj.bias"):
                stitched[name] = torch.linspace(-1.0, 1.0, stitched[name].numel())
        save_file(stitched, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    target = Target.load(str(folder))
    native = older_drafter(str(folder), "mtp", target)
    assert isinstance(native, LlamaMtp)
    own, wanted = native.state_dict(), drafter.state_dict()
    assert {name for name in own if name not in wanted} == {
        f"layer.self_attn.{kind}_proj.bias" for kind in "qkv" if biased
    }
    assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())
    checkpoint.save(native, tmp_path / "tuned", target)
    again = checkpoint.load(tmp_path / "tuned", target)
    out = export(tmp_path / "tuned", "vllm")
    assert again.state_dict().keys() == own.keys()
    old, new = stitched_tensors(folder), stitched_tensors(out)
    assert all(torch.equal(old[name], new[name]) for name in old if "mtp_layers" in name)


def test_a_target_with_other_modules_than_one_is_refused(
    exported: Callable[..., tuple[Target, LlamaMtp, Path]],
) -> None:
    target, _, folder = exported()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 3}))
    with pytest.raises(UserError, match="counts 3 MTP modules, of which one is read"):
        checkpoint.load(folder, target)


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_module_beside_its_target_is_read_by_vllm(
    exported: Callable[..., tuple[Target, LlamaMtp, Path]], arch: str, tmp_path: Path
) -> None:
    """Qwen3's heads are wider than its states; the block's are not."""
    target, drafter, folder = exported(arch)
    assert drafter.taps == (FINAL,)
    tensors = load_file(folder / "model.safetensors")
    # What the engine would miss among the weights of its module.
    assert {name for name in tensors if "mtp_layers" not in name} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    check_module(target, drafter, folder, tensors, FINAL)
    assert torch.equal(tensors["lm_head.weight"], target.output_weight)
    out = export(tmp_path / "draft", "vllm")
    card = (out / "README.md").read_text()
    assert f"vllm serve {target.name} " in card and '"method": "mtp"' in card
    assert """--hf-overrides '{"num_nextn_predict_layers": 1}'""" in card


@pytest.mark.parametrize("arch", ["gemma", "gpt_neox", "mistral"])
def test_targets_that_the_layout_cannot_express_are_refused(
    exported: Callable[..., object], arch: str
) -> None:
    # mistral: its sliding window.
    with pytest.raises(UserError, match="train an eagle3 draft"):
        exported(arch)


def test_a_module_of_another_width_is_refused(exported: Callable[..., object]) -> None:
    with pytest.raises(UserError, match="needs an MTP layer of the target's shape"):
        exported("llama", MtpOptions(intermediate_size=40))
