"""Outline of a target that is not run here: configuration, tokenizer, shapes and revision. Of its
weights a draft may read the tables of its input and output tokens, which are read from the files
when it asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from draftsmith.drafters.checkpoint import locate
from draftsmith.drafters.init_from_target import shares_embeddings
from draftsmith.drafters.quirks.patches import implementation
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import CausalLM, PassProbe
from draftsmith.drafters.target.device import device_of
from draftsmith.drafters.target.load import adapter_base, build_model, load_config, load_model
from draftsmith.drafters.target.target import FIRST, Target, TargetParameter, digest_of, revision_of
from draftsmith.drafters.weights import weight_files
from draftsmith.errors import UserError


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
        self._tokenizer = None

    @property
    def device(self) -> torch.device:
        return self._place

    def own_paged(self, *inputs: object, **named: object) -> NoReturn:
        raise RuntimeError(f"the outline of {self.name!r} has no weights to run")

    full = own_head = own_paged

    @cached_property
    def _input_table(self) -> torch.Tensor:
        if not shares_embeddings(self):
            raise UserError(
                f"target {self.name!r} does more than look its input tokens up in a table, which "
                "learn.teacher=recorded cannot do for the draft; give learn.teacher=live"
            )
        return self._table_of(PreTrainedModel.get_input_embeddings)

    @cached_property
    def _output_table(self) -> torch.Tensor:
        return self._table_of(PreTrainedModel.get_output_embeddings)

    def _table_of(self, module_of: Callable[[PreTrainedModel], torch.nn.Module]) -> torch.Tensor:
        """Weight of the module: that tensor alone where the files have the model's own names, else
        all weights are read, once."""
        weight = module_of(self.model).weight
        name = next(name for name, one in self.model.named_parameters() if one is weight)
        folder = None if adapter_base(self.name) is not None else locate(self.name, "target")
        if folder is not None and parameters_in(folder, self.model) is not None:
            for file_path in weight_files(folder):
                with safe_open(file_path, framework="pt") as file:
                    if name in file.keys():  # noqa: SIM118 - not a dict
                        return file.get_tensor(name).to(self._place)
        whole = load_model(self.name, trust_remote_code=self.trust_remote_code)
        table = module_of(whole).weight
        if not table.is_floating_point():
            raise UserError(
                f"table {name!r} of target {self.name!r} is quantised, and learn.teacher=recorded "
                "reads it as it is; give learn.teacher=live"
            )
        return table.detach().clone().to(self._place)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self._input_table)

    @property
    def output_weight(self) -> torch.Tensor:
        return self._output_table


def shapes_of(lm: CausalLM) -> PassProbe:
    table = lm.model.get_output_embeddings().weight
    return PassProbe(table.shape[1], table.shape[0], [])


def load_outline(
    path: str, *, device: str | None = None, max_length: int | None = None, trust_remote_code: bool
) -> TargetOutline:
    """Outline of a local folder or Hub id. Weights are read for the revision
    alone: 64 values of each parameter where the files have the model's own names, else all of
    them, once. Raises `UserError`."""
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


def parameters_in(folder: Path, model: PreTrainedModel) -> list[TargetParameter] | None:
    """The model's parameters, in its order, with the first values of each, from safetensors. None
    where the files hold others: a model whose weights are converted while they are loaded."""
    found: dict[str, TargetParameter] = {}
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    for path in weight_files(folder):
        if path.suffix != ".safetensors" or not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                values = file.get_slice(name)
                if tuple(values.get_shape()) == wanted.get(name):
                    found[name] = TargetParameter(
                        name, wanted[name], first_rows(values, wanted[name])
                    )
                elif name not in buffers:
                    return None
    return [found[name] for name in wanted] if found.keys() == wanted.keys() else None


def first_rows(values: Any, shape: torch.Size) -> torch.Tensor:
    """The first `FIRST` values of a tensor in a file, and at most the rest of a row with them."""
    if not shape:
        return values[...].flatten()
    return values[: math.ceil(FIRST / max(1, math.prod(shape[1:])))].flatten()[:FIRST]
