"""Outline of a target for learning from records alone: configuration, tokenizer, shapes and
revision, and no weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from draftsmith.drafters.checkpoint import locate
from draftsmith.drafters.patches.table import implementation
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import CausalLM, Probe
from draftsmith.drafters.target.device import device_of
from draftsmith.drafters.target.load import adapter_base, build_model, load_config, load_model
from draftsmith.drafters.target.target import (
    FIRST,
    SAME_AS,
    Parameter,
    Target,
    digest_of,
    revision_of,
)
from draftsmith.drafters.weights import weight_files


class TargetOutline(Target):
    """A target that can be named and compared with, and cannot be run. `model` is on the meta
    device, `place` where drafts for it are put."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        revision: str,
        place: torch.device,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        CausalLM.__init__(self, model, name, shapes_of, max_length=max_length)
        self.trust_remote_code, self._place = trust_remote_code, place
        self.revision = revision + ("-long" if self.has_long_factors else "")
        self.same_as = getattr(model.config, SAME_AS, None)
        self._tokenizer = None

    @property
    def device(self) -> torch.device:
        return self._place

    def own_paged(self, *inputs: object, **named: object) -> NoReturn:
        raise RuntimeError(f"the outline of {self.name!r} has no weights to run")

    full = own_head = embed = own_paged


def shapes_of(lm: CausalLM) -> Probe:
    table = lm.model.get_output_embeddings().weight
    return Probe(table.shape[1], table.shape[0], [])


def load_outline(
    path: str,
    *,
    device: str | None = None,
    max_length: int | None = None,
    trust_remote_code: bool,
) -> TargetOutline:
    """Outline of a local folder or Hub id. Weights are read for the revision alone: 64 values of
    each parameter where the files have the model's own names, else all of them, once. Raises
    `UserError`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = build_model(
            config,
            trust_remote_code=trust_remote_code,
            attn_implementation=implementation(config, register()),
        )
    parameters = None
    if adapter_base(path) is None:
        parameters = parameters_in(locate(path, "target"), model)
    if parameters is None:
        revision = revision_of(load_model(path, trust_remote_code=trust_remote_code))
    else:
        revision = digest_of(parameters)
    return TargetOutline(
        model.eval(),
        str(path),
        revision=revision,
        place=device_of(device),
        max_length=max_length,
        trust_remote_code=trust_remote_code,
    )


def parameters_in(folder: Path, model: PreTrainedModel) -> list[Parameter] | None:
    """The model's parameters, in its order, with the first values of each, from safetensors. None
    where the files hold others: a model whose weights are converted while they are loaded."""
    found: dict[str, Parameter] = {}
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    for path in weight_files(folder):
        if path.suffix != ".safetensors" or not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                values = file.get_slice(name)
                if tuple(values.get_shape()) == wanted.get(name):
                    found[name] = Parameter(name, wanted[name], first_rows(values, wanted[name]))
                elif name not in buffers:
                    return None
    return [found[name] for name in wanted] if found.keys() == wanted.keys() else None


def first_rows(values: Any, shape: torch.Size) -> torch.Tensor:
    """The first `FIRST` values of a tensor in a file, and at most the rest of a row with them."""
    if not shape:
        return values[...].flatten()
    return values[: math.ceil(FIRST / max(1, math.prod(shape[1:])))].flatten()[:FIRST]
