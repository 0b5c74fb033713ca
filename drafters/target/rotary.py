"""Rotary embeddings whose frequencies follow the longest position of a forward pass: LongRoPE and
dynamic NTK.

transformers chooses their frequencies once per pass, by `max(position_ids)`. A pass here holds the
tokens of many requests and their drafts, so beyond the length at which the frequencies change, a
request's text would depend on its neighbours, on how its prompt is cut into chunks, and on what was
drafted. Up to that length they are constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from draftsmith.errors import UserError

LONG = ("longrope", "su")  # "su" is what Phi-3's first checkpoints call it


class RopeLimit(NamedTuple):
    rope_type: str
    positions: int  # texts of at most so many tokens are rotated alike in every pass

    def check(self, length: int, name: str, what: str) -> None:
        """Raises `UserError` if texts of `length` tokens, by the option or argument `what`, pass
        the limit of model `name`."""
        if length > self.positions:
            raise UserError(
                f"{what} is {length}: {self.reason(name)}; make it at most {self.positions}"
            )

    def reason(self, name: str) -> str:
        return (
            f"{name!r} has rope_type {self.rope_type!r}, which beyond {self.positions} positions "
            "rotates every text of a pass by the longest one"
        )


def rope_limit(config: PreTrainedConfig) -> RopeLimit | None:
    """The tightest of all layers' limits; None where the frequencies never change. `config` is the
    text model's."""
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
            limits.append(RopeLimit(kind, min(int(length) for length in originals if length)))
    return min(limits, key=lambda limit: limit.positions, default=None)


def _parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters of every kind of layer: from a mapping of its own, or one for all; under
    the new name and the old one."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if isinstance(given, Mapping):
            yield given
            yield from (value for value in given.values() if isinstance(value, Mapping))
