"""MTP modules of Qwen3-Next, Qwen3.5 and Ernie-4.5 in their targets' checkpoints and in the
speculators layout, FP8 modules, and MiMo's target: read and run as published."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp import LlamaMtp
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp
from draftsmith.drafters.layouts.fp8 import dequantised
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.unrolled import unroll_batch

IDS = torch.randint(2, 288, (1, 12), generator=torch.Generator().manual_seed(1))
Find = Callable[..., str]
QWEN = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm", "layer": "mtp.layers.0",
}  # fmt: skip
NAMES = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "ernie4_5_moe": {
        "eh_proj": "model.mtp_linear_proj.0", "enorm": "model.mtp_emb_norm.0",
        "hnorm": "model.mtp_hidden_norm.0", "layer": "model.mtp_block.0",
    },
}  # fmt: skip
SPECULATORS = {
    "eh_proj": "mtp_layers.0.input_proj", "enorm": "mtp_layers.0.token_layernorm",
    "hnorm": "mtp_layers.0.hidden_layernorm", "norm": "mtp_layers.0.final_layernorm",
    "layer": "mtp_layers.0",
}  # fmt: skip


class Module:
    """A module of random weights around a layer of the target's class, and its formula."""

    def __init__(self, target: Target, arch: str):
        config = copy.deepcopy(target.config)
        config._attn_implementation, config.moe_layer_start_index = "eager", 99
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * target.num_layers
        index = max(at for at, kind in enumerate(kinds) if kind == "full_attention")
        self.layer = type(target.layers[index])(config, index).eval()
        self.target, self.is_ernie = target, arch == "ernie4_5_moe"
        # Qwen's gains are stored less 1.
        self.shift = 0.0 if self.is_ernie else 1.0
        generator, size = torch.Generator().manual_seed(0), target.hidden_size
        for tensor in (*self.layer.parameters(), *self.layer.buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = (
                1.5 * tensor.shape[-1] ** -0.5 * noise
                if tensor.ndim > 1
                else 1 - self.shift + 0.1 * noise
            )
        self.own = {
            name: 1 - self.shift + 0.3 * torch.randn(size, generator=generator)
            for name in ("enorm", "hnorm", "norm")
        }
        self.own["eh_proj"] = torch.randn(size, 2 * size, generator=generator) / size**0.5

    def tensors(self, names: dict[str, str]) -> dict[str, torch.Tensor]:
        published = {
            f"{names[name]}.weight": one for name, one in self.own.items() if name in names
        }
        for name, tensor in self.layer.state_dict().items():
            name = f"{names['layer']}.{name}"
            if name.endswith("experts.gate_up_proj"):
                for number, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    expert = name.replace("gate_up_proj", str(number))
                    published |= {
                        f"{expert}.gate_proj.weight": gate,
                        f"{expert}.up_proj.weight": up,
                    }
            elif name.endswith("experts.down_proj"):
                for number, down in enumerate(tensor):
                    published[name.replace("down_proj", f"{number}.down_proj.weight")] = down
            else:
                published[name] = tensor
        return {name: tensor.clone() for name, tensor in published.items()}

    def normed(self, states: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.target.config.rms_norm_eps
        states = states * (states.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()
        return states * (self.shift + self.own[name])

    def run(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        embeds = self.target.embed(tokens)
        if self.is_ernie:
            embeds = torch.where(positions[..., None] == 0, 0, embeds)
        pair = [self.normed(embeds, "enorm"), self.normed(states, "hnorm")]
        mixed = torch.cat(pair, dim=-1) @ self.own["eh_proj"].T
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rotary = self.target.model.base_model.rotary_emb(mixed, positions)
        out = self.layer(
            mixed, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        return out if self.is_ernie else self.normed(out, "norm")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("arch", [*NAMES, "speculators"])
def test_a_shipped_module_follows_its_formula(arch: str, tiny_target: Find, tmp_path: Path) -> None:
    kind = "qwen3_next" if arch == "speculators" else arch
    target = Target.load(tiny_target(kind), dtype=torch.float32)
    module = Module(target, arch)
    config = json.loads((Path(target.name) / "config.json").read_text())
    if arch == "speculators":
        tensors = module.tensors(SPECULATORS)
        config = {
            "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1, "transformer_layer_config": config,
        }  # fmt: skip
    else:
        whole = load_file(Path(target.name) / "model.safetensors")
        tensors = whole | module.tensors(NAMES[arch])
        config |= {"num_nextn_predict_layers": 1} if arch == "ernie4_5_moe" else {}
    drafter = checkpoint.load(write(tmp_path / "draft", config, tensors), target)
    assert isinstance(drafter, AppendedMtp)
    final = target.states(IDS, torch.ones_like(IDS), ())[1]
    batch = unroll_batch(drafter, target, IDS, 2)
    with torch.no_grad():
        first, second = (step.hidden for step in drafter.unroll(batch))
        for anchor in (0, 8):
            true = final[:, : anchor + 1]
            read = module.run(IDS[:, 1 : anchor + 2], true)
            torch.testing.assert_close(first[:, : anchor + 1], read, rtol=1e-4, atol=1e-4)
            again = torch.cat([true, read[:, -1:]], dim=1)
            read = module.run(IDS[:, 1 : anchor + 3], again)
            torch.testing.assert_close(second[:, anchor + 1], read[:, -1], rtol=1e-4, atol=1e-4)
    checkpoint.save(drafter, tmp_path / "again", target)
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
    assert (
        checkpoint.load(tmp_path / "again", target).state_dict().keys()
        == drafter.state_dict().keys()
    )
    assert_serves(target, drafter)


def assert_serves(target: Target, drafter: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    plain, drafted = (
        build_engine(target, draft, EngineConfig(k=3, compile="off")).generate(
            [IDS[0, :5].tolist(), IDS[0, 3:].tolist()], params, text=False
        )
        for draft in (None, drafter)
    )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_mimo_is_served_with_its_module(tiny_target: Find, tmp_path: Path) -> None:
    """As published: a name that transformers does not have, and code of its own that is not run."""
    folder = tmp_path / "mimo"
    shutil.copytree(tiny_target("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    noise, layer = torch.Generator().manual_seed(0), "model.layers.3."
    module = {
        name.replace(layer, "model.mtp_layers.0."): tensor.flip(0).clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        module[f"model.mtp_layers.0.{name}.weight"] = 1 + 0.1 * torch.randn(32, generator=noise)
    module["model.mtp_layers.0.input_proj.weight"] = torch.randn(32, 64, generator=noise) / 8
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1,
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
    }  # fmt: skip
    write(folder, config, tensors | module)
    target = Target.load(folder, dtype=torch.float32)
    drafter = checkpoint.load(folder, target)
    assert isinstance(drafter, LlamaMtp) and drafter.layer.self_attn.q_proj.bias is not None
    assert_serves(target, drafter)


def quantised(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-size // block) for size in tensor.shape)
    scales, codes = torch.empty(rows, columns), torch.empty_like(tensor)
    for row in range(rows):
        for column in range(columns):
            part = (
                slice(row * block, (row + 1) * block),
                slice(column * block, (column + 1) * block),
            )
            scales[row, column] = tensor[part].abs().max() / 448
            codes[part] = tensor[part] / scales[row, column]
    return codes.to(torch.float8_e4m3fn), scales


def test_an_fp8_module_of_deepseek_is_read(
    native_target: Callable[..., Path], tmp_path: Path
) -> None:
    """Scales of blocks, of which the last ones are not whole."""
    whole, prefix, block = native_target("deepseek_v3"), "model.layers.2.", 10
    tensors, expected = load_file(whole / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith(prefix)]:
        if tensors[name].ndim == 2 and "gate.weight" not in name:
            codes, scales = quantised(tensors[name], block)
            spread = scales.repeat_interleave(block, 0)[: codes.shape[0]]
            spread = spread.repeat_interleave(block, 1)[:, : codes.shape[1]]
            expected[name] = codes.float() * spread
            tensors |= {name: codes, f"{name}_scale_inv": scales}
    shutil.copytree(whole, tmp_path / "draft", ignore=shutil.ignore_patterns("whole"))
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "draft" / "config.json"
    fp8 = {"quant_method": "fp8", "weight_block_size": [block, block]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fp8}))
    target = Target.load(whole, dtype=torch.float32)
    drafter = checkpoint.load(tmp_path / "draft", target)
    checkpoint.save(drafter, tmp_path / "again", target)
    saved = load_file(tmp_path / "again" / "model.safetensors")
    same = [torch.equal(saved[name], one) for name, one in expected.items() if name in saved]
    assert len(same) > 10 and all(same)
    assert_serves(target, drafter)


@pytest.mark.parametrize("shape", [(), (6,), (6, 1), (3, 2)])
def test_scales_of_every_shape_are_spread(shape: tuple[int, ...]) -> None:
    codes = torch.arange(-12, 12).view(6, 4).to(torch.float8_e4m3fn)
    scale = 1 + torch.arange(max(1, torch.Size(shape).numel())).float().view(shape)
    tensors = {"a": codes, "a_scale": scale, "b": torch.ones(1)}
    found = dequantised(tensors, "here", (2, 2))
    rows = {(): [1] * 6, (6,): range(1, 7), (6, 1): range(1, 7)}.get(shape)
    spread = (
        torch.tensor(list(rows))[:, None].expand(6, 4)
        if rows is not None
        else scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    )
    assert found.keys() == {"a", "b"} and torch.equal(found["a"], codes.float() * spread)
    with pytest.raises(UserError, match="'a' of 'here' is stored as FP8 without"):
        dequantised({"a": codes}, "here")
    if len(shape) == 2 and shape[1] > 1:
        with pytest.raises(UserError, match=r"where blocks of 128 x 128 give \[1, 1\]"):
            dequantised(tensors, "here")
