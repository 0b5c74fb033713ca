"""Run by the Python that has speculators, a release with the folder's type first on its path:
`python speculators_logits_probe.py FOLDER TARGET INPUTS OUT` writes the logits that the library's
own model computes from `ids` [1, T] and the target's `states` [1, T, H]."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from transformers import AutoModelForCausalLM


def logits(folder: str, target: str, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    if "eagle" in SpeculatorModel.registry:
        verifier = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32)
        model = SpeculatorModel.from_pretrained(
            folder, verifier=verifier, verifier_attachment_mode="train_only"
        )
        mask = torch.ones_like(ids)
        return model.eval()(ids, states, attention_mask=mask, return_dict=False)
    return SpeculatorModel.from_pretrained(folder).eval()(ids, states)[0][0]


if __name__ == "__main__":
    given = load_file(sys.argv[3])
    with torch.no_grad():
        found = logits(sys.argv[1], sys.argv[2], given["ids"], given["states"])
    save_file({"logits": found.contiguous()}, sys.argv[4])
