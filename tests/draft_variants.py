"""What published layouts leave open, as more rows like theirs: EAGLE-3's norms, biases and layers,
vLLM's names for Medusa, and tensors that are copied or shared out over files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.target.target import Target
from tests.published_drafts import (
    SIZE,
    VOCAB,
    Config,
    Layout,
    Made,
    Noise,
    Tensors,
    angelslim_eagle3,
    eagle3_config,
    eagle3_reference,
    eagle3_rest,
    ibm,
    layer_tensors,
    medusa_reference,
    medusa_tensors,
    mlp_reference,
    redhat_eagle3,
    table,
)

EAGLE3: dict[str, Config] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_fc, nested": {"eagle_config": {"norm_before_fc": True}},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "bias": {"attention_bias": True},
    "three layers": {"num_hidden_layers": 3},
    "everything": {
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
        "attention_bias": True, "num_hidden_layers": 2,
    },
}  # fmt: skip


def eagle3(target: Target, variant: Config) -> Made:
    """Every tensor that vLLM's loader would fill, under the names it knows."""
    config = eagle3_config(
        "LlamaForCausalLMEagle3",
        draft_vocab_size=VOCAB,
        target_hidden_size=SIZE,
        eagle_aux_hidden_state_layer_ids=[1, 3],
        **variant,
    )
    noise, bias = Noise(13), "qkvo" if "attention_bias" in variant else ""
    tensors = layer_tensors(noise, "layers.0.", inputs=2 * SIZE, bias=bias)
    tensors |= eagle3_rest(noise, "layers.0.", VOCAB)
    for layer in range(1, config["num_hidden_layers"]):
        tensors |= layer_tensors(noise, f"layers.{layer}.", bias=bias)
        # vLLM builds the hidden norm in every layer and uses it in the first.
        tensors[f"layers.{layer}.hidden_norm.weight"] = noise.gains(SIZE)
    if config.get("eagle_config", config).get("norm_before_fc"):
        tensors["input_norm.weight"] = noise.gains(2 * SIZE)
    if "fc_norm" in variant:
        tensors |= {f"fc_norm.{index}.weight": noise.gains(SIZE) for index in range(2)}
    return Made(config, tensors)


def trained_eagle3(target: Target) -> Made:
    """Under the name that speculators' trainer writes; a missing `norm_before_residual` means
    true there."""
    made = redhat_eagle3(target)
    config = made.config | {"architectures": ["Eagle3DraftModel"]}
    del config["norm_before_residual"]
    return Made(config, made.tensors)


def trained_reference(config: Config, *given: Any) -> torch.Tensor:
    return eagle3_reference(config | {"norm_before_residual": True}, *given)


def sharded_eagle3(target: Target) -> Made:
    def share_out(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {key: f"model-{1 + at % 2:05}-of-00002.safetensors" for at, key in enumerate(names)}
        for file in {*files.values()}:
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    made = angelslim_eagle3(target)
    return Made(made.config, made.tensors, files=share_out)


def vllm_medusa(target: Target, *, tables: bool) -> Made:
    """With the target's table where the heads have none of their own."""
    config = {
        "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": SIZE,
        "vocab_size": VOCAB, "truncated_vocab_size": VOCAB, "medusa_fc_bias": True,
        "original_lm_head": not tables,
    }  # fmt: skip
    tensors: Tensors = {} if tables else {"lm_head.weight": table(target).detach().clone()}
    for name, tensor in medusa_tensors(heads=3, layers=2, tables=tables).items():
        head, layer, *rest = name.split(".")
        name = f"blocks.{head}.layers.{layer}.{rest[-1]}" if rest[1:] else f"lm_heads.{head}.weight"
        tensors[name] = tensor
    return Made(config, tensors)


def vllm_reference(config: Config, tensors: Tensors, *given: Any) -> torch.Tensor:
    named = medusa_tensors(heads=3, layers=2, tables=not config["original_lm_head"])
    return medusa_reference({"medusa_num_layers": 2}, named, *given)


def original_medusa(target: Target) -> Made:
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "vicuna"}
    tensors = medusa_tensors(heads=3, layers=2)
    return Made(config, tensors, stored="medusa_lm_head.safetensors")


def copied_mlp(target: Target) -> Made:
    """Tied, with what the depths share written for each of them."""
    made = ibm(target, tied=True)
    tensors: Tensors = {}
    for name, tensor in made.tensors.items():
        module, first, kind = name.removeprefix("speculator.").split(".")
        for depth in {"proj": {"0": [0], "1": [1, 2]}}.get(module, {"0": [0, 1, 2]})[first]:
            tensors[f"speculator.{module}.{depth}.{kind}"] = tensor.clone()
    return Made(made.config, tensors)


VARIANTS = [
    *(
        Layout(f"EAGLE-3, {name}", "eagle3", partial(eagle3, variant=variant), eagle3_reference)
        for name, variant in EAGLE3.items()
    ),
    Layout("EAGLE-3, speculators' trainer", "eagle3", trained_eagle3, trained_reference),
    Layout("EAGLE-3 in two files", "eagle3", sharded_eagle3, eagle3_reference),
    Layout("Medusa, two layers", "medusa", original_medusa, medusa_reference),
    Layout("Medusa, vLLM", "medusa", partial(vllm_medusa, tables=True), vllm_reference),
    Layout("Medusa, vLLM, no tables", "medusa", partial(vllm_medusa, tables=False), vllm_reference),
    Layout("MLP speculator, tied copies", "mlp", copied_mlp, mlp_reference),
    Layout("MLP speculator, scaled", "mlp", partial(ibm, tied=False, scaled=True), mlp_reference),
]
