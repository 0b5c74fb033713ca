"""Lengths up to which a text's states depend on that text alone, where a model is made for more.

Rotary embeddings: transformers chooses the frequencies of LongRoPE and dynamic NTK once per pass,
by `max(position_ids)`. A pass here holds the tokens of many requests and their drafts, so beyond
the length at which the frequencies change, a request's text would depend on its neighbours, on how
its prompt is cut into chunks, and on what was drafted. Up to that length they are constant.
LongRoPE has two sets of frequencies: a target that is loaded for longer texts (`lengthen`) has the
long set in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError

LONG = ("longrope", "su")  # "su" is what Phi-3's first checkpoints call it


class RopeLimit(NamedTuple):
    rope_type: str
    positions: int  # texts of at most so many tokens are rotated alike in every pass

    def check(self, length: int, name: str, what: str) -> None:
        """Raises `UserError` if texts of `length` tokens, by the option or argument `what`, pass
        the limit of model `name`."""
        if length > self.positions:
            mend = f"make it at most {self.positions}"
            if self.rope_type in LONG:
                mend += ", or load the target for such texts (max_length)"
            raise UserError(f"{what} is {length}: {self.reason(name)}; {mend}")

    def choice(self, longest: int) -> str:
        """The mend for a server of a model of `longest` positions."""
        return (
            f"give --max-length {self.positions} (max_length in Python) for the factors of short "
            f"texts, or up to {longest} for those of long ones"
        )

    def reason(self, name: str) -> str:
        return (
            f"{name!r} has rope_type {self.rope_type!r}, which beyond {self.positions} positions "
            "rotates every text of a pass by the longest one"
        )


def rope_limit(config: PreTrainedConfig, *, lengthened: int = 0) -> RopeLimit | None:
    """The tightest of all layers' limits; None where the frequencies never change. `config` is the
    text model's, `lengthened` what `lengthen` was given."""
    longest = getattr(config, "max_position_embeddings", None)
    limits = []
    for parameters in _parameters(config):
        kind = str(parameters.get("rope_type") or parameters.get("type"))
        if kind in LONG or "dynamic" in kind:
            originals = (
                parameters.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
                longest,
            )
            limit = RopeLimit(kind, min(int(length) for length in originals if length))
            if kind not in LONG or limit.positions >= lengthened:
                limits.append(limit)
    return min(limits, key=lambda limit: limit.positions, default=None)


def _parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters of every kind of layer: from a mapping of its own, or one for all; under
    the new name and the old one."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if isinstance(given, Mapping):
            yield given
            yield from (value for value in given.values() if isinstance(value, Mapping))


@torch.no_grad()
def lengthen(body: torch.nn.Module, length: int) -> bool:
    """Gives every LongRoPE module whose texts of `length` tokens pass its limit the long factors
    for good, for its shorter texts too. True where there was one."""
    modules = [module for module in body.modules() if hasattr(module, "rope_type")]
    found = [_lengthened(module, kind, length) for module in modules for kind in _kinds(module)]
    return any(found)


def _kinds(module: torch.nn.Module) -> list[str | None]:
    """Kinds of layer that a module keeps frequencies of; None for one that keeps one set."""
    return list(module.rope_type) if isinstance(module.rope_type, dict) else [None]


def _lengthened(module: torch.nn.Module, kind: str | None, length: int) -> bool:
    parameters, prefix = module.config.rope_parameters, ""
    if kind is not None:
        parameters, prefix = parameters[kind], f"{kind}_"
    if (
        parameters["rope_type"] != "longrope"
        or length <= parameters["original_max_position_embeddings"]
    ):
        return False
    frequencies = getattr(module, f"{prefix}inv_freq")
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, frequencies.device, seq_len=length, layer_type=kind
    )
    frequencies.copy_(long)
    # Here transformers looks, in every pass, for frequencies that it must choose again.
    if kind is None:
        module.rope_type = "default"
    else:
        module.rope_type[kind] = "default"
    return True
