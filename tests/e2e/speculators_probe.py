"""Run by the Python that has speculators: loads a folder with that library's own reader and writes
what it holds."""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModel

if __name__ == "__main__":
    folder, out = sys.argv[1:3]
    torch.manual_seed(0)
    model = SpeculatorModel.from_pretrained(folder)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, f"{out}/read.safetensors")
    config = model.config.to_dict()
    kept = (
        "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm",
        "norm_output", "draft_vocab_size", "aux_hidden_state_layer_ids", "block_size",
        "sample_from_anchor",
    )  # fmt: skip
    with open(f"{out}/read.json", "w", encoding="utf-8") as handle:
        json.dump({"class": type(model).__name__, **{key: config.get(key) for key in kept}}, handle)
