"""Layers that stay in a model's safetensors files.

A tensor is read for every pass. Where transformers makes a parameter of several tensors (experts,
one by one in the files, are joined), its own conversion does so at each reading, for one parameter
at a time: no converted copy is written, and no layer is read while the model is opened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.errors import UserError


class LayerSource(NamedTuple):
    key: str  # of a tensor in the files
    pattern: str  # of the converter that takes it


class LayerGroup(NamedTuple):
    """Tensors that one conversion makes parameters of."""

    converter: WeightConverter
    sources: list[LayerSource]


class LayerFiles:
    """Files of one model; filled in while transformers opens it."""

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}  # open file by key of each of its tensors
        self.groups: dict[str, LayerGroup] = {}  # by the converter's first parameter
        self.first: dict[str, str] = {}  # that parameter, by name of every converted one
        self.plain: set[str] = set()  # parameters that are read as they are
        self.dtypes: dict[str, torch.dtype] = {}  # by parameter

    def class_of(self, own: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """The model's class, which reads none of its offloaded layers when it is opened. `own` is
        the class to go back to afterwards."""

        def load(model: Any, state: Any, files: list[str] | None, options: Any, *rest: Any) -> Any:
            beside = self.open(model, files or [], options)
            info, index = own._load_pretrained_model(model, beside, files, options, *rest)
            index = {**(index or {}), **{name: {} for name in self.first}}
            # Tied parameters that the files have once stay missing, by which they are tied.
            info.missing_keys -= self.plain | self.first.keys()
            return info, index

        methods = {"_load_pretrained_model": staticmethod(load), "__module__": own.__module__}
        return type(own.__name__, (own,), methods)

    def open(self, model: PreTrainedModel, files: list[str], options: Any) -> dict[str, Any]:
        """Slices of all tensors that are not of offloaded parameters. Raises `UserError`."""
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise UserError(
                f"target_offload is 'disk' and the files of {model.name_or_path!r} are no "
                "safetensors; save it anew with safetensors, or leave it out"
            )
        for file in files:
            handle = safe_open(file, framework="pt")
            self.handles |= dict.fromkeys(handle.keys(), handle)
        renamings = [one for one in options.weight_mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in options.weight_mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        self.dtypes = {name: own.dtype for name, own in model.state_dict().items()}
        on_disk = self._on_disk(model, options.device_map)
        beside: dict[str, Any] = {}
        # The order in which transformers joins them.
        for key in sorted(self.handles, key=dot_natural_key):
            name, pattern = self._renamed(model, key, renamings, converters)
            if name not in on_disk:
                beside[key] = self.handles[key].get_slice(key)
            elif pattern is None:
                self.plain.add(name)
            else:
                group = self.groups.setdefault(name, LayerGroup(by_pattern[pattern], []))
                group.sources.append(LayerSource(key, pattern))
        for name in self.groups:
            self.first |= dict.fromkeys(self._made_by(model, name, on_disk), name)
        return beside

    def _on_disk(self, model: PreTrainedModel, places: dict[str, str]) -> set[str]:
        """Names of offloaded parameters; buffers are read at once."""
        prefixes = tuple(f"{name}." for name, place in places.items() if place == "disk")
        return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}

    def _renamed(
        self,
        model: PreTrainedModel,
        key: str,
        renamings: list[WeightRenaming],
        converters: list[WeightConverter],
    ) -> tuple[str, str | None]:
        """The parameter that a tensor is of, or the first of them, and the pattern of its
        converter, if it has one: as transformers names it."""
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, self.dtypes)
        if name not in self.dtypes and key in self.dtypes:
            name, pattern = rename_source_key(key, [], [], prefix, self.dtypes)
        return name, pattern

    def _made_by(self, model: PreTrainedModel, first: str, on_disk: set[str]) -> set[str]:
        """Parameters that a conversion makes, tried without values. Raises `UserError`."""
        parameters = dict(model.named_parameters())
        try:
            made = self.convert(model, first, "meta")
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._refusal(model, first) from error
        shapes = {name: parameters[name].shape for name in made.keys() & on_disk}
        if first not in shapes or any(made[name].shape != shape for name, shape in shapes.items()):
            raise self._refusal(model, first)
        return set(shapes)

    def _refusal(self, model: PreTrainedModel, name: str) -> UserError:
        return UserError(
            f"target_offload is 'disk' and {name!r} of {model.name_or_path!r} cannot be made of "
            "the tensors in its files by itself; give cpu with CUDA, or leave it out"
        )

    def convert(self, model: PreTrainedModel, first: str, device: str) -> dict[str, torch.Tensor]:
        """Parameters of one conversion; on the meta device without reading their tensors."""
        group = self.groups[first]
        converter = deepcopy(group.converter)
        for key, pattern in group.sources:
            # Called as it is converted, so that the tensors are held no longer.
            converter.add_tensor(
                first, key, pattern, lambda key=key: self._read(key, first, device)
            )
        made = converter.convert(first, model=model, config=model.config)
        return {name: own[0] if isinstance(own, list) else own for name, own in made.items()}

    def _read(self, key: str, name: str, device: str) -> torch.Tensor:
        if device == "meta":
            shape = self.handles[key].get_slice(key).get_shape()
            return torch.empty(shape, dtype=self.dtypes[name], device=device)
        return self.handles[key].get_tensor(key).to(self.dtypes[name])

    def give_to(self, model: PreTrainedModel) -> None:
        """Lets the hooks read converted parameters by `convert`, and others as they do."""
        for weights in weights_of_hooks(model) if self.groups else ():
            weights.dataset = Converted(self, model, weights.dataset)


def converted_parameters(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Parameters that transformers makes of other tensors, where the files have them as they were
    published. The model may be on the meta device."""
    patterns = [
        re.compile(pattern.replace(r"\1", ".+"))
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightConverter)
        for pattern in transform.target_patterns
    ]
    named = model.named_parameters(remove_duplicate=False)
    return {own for name, own in named if any(one.search(name) for one in patterns)}


class Converted(Mapping[str, torch.Tensor]):
    """Offloaded parameters by name: converted ones of `files`, others of `plain`."""

    def __init__(
        self, files: LayerFiles, model: PreTrainedModel, plain: Mapping[str, torch.Tensor]
    ):
        self.files, self.model, self.plain = files, model, plain

    def __getitem__(self, name: str) -> torch.Tensor:
        first = self.files.first.get(name)
        if first is None:
            return self.plain[name]
        return self.files.convert(self.model, first, "cpu")[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


if TYPE_CHECKING:
    from accelerate.utils.offload import PrefixedDataset


def keep_needed_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """The model with hooks on those modules alone whose weights are elsewhere: a hook binds a
    module's forward, and a copy of the head must run its own."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import has_offloaded_params

    for module in model.modules():
        if hasattr(module, "_hf_hook") and not has_offloaded_params(module):
            remove_hook_from_module(module)
            vars(module).pop("forward", None)
    return model


def weights_of_hooks(model: PreTrainedModel) -> Iterator[PrefixedDataset]:
    """Mappings, one per hook, from which offloaded weights are read."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                yield weights


@contextmanager
def weights_here(*modules: torch.nn.Module) -> Iterator[None]:
    """Holds the own weights of offloaded modules in memory meanwhile."""
    with ExitStack() as stack:
        for module in modules:
            if any(own.is_meta for own in module.parameters(recurse=False)):
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(module))
        yield


def device_map(model: PreTrainedModel, device: str, layers_on: str) -> dict[str, str]:
    """Places by name, as transformers takes them: `layers_on` ("cpu" or "disk") of the decoder's
    layers, else `device`. The model may be on the meta device."""
    # accelerate warns of what was asked for.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    body = getattr(model, body_name(model))
    layers = decoder_layers(body, model.config.get_text_config().num_hidden_layers)
    name = next(name for name, module in model.named_modules() if module is layers)
    places, prefix, module = {name: layers_on}, "", model
    for part in name.split("."):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        beside = (other for other, _ in (*module.named_children(), *own) if other != part)
        places |= {f"{prefix}{other}": device for other in beside}
        module, prefix = getattr(module, part), f"{prefix}{part}."
    return places
