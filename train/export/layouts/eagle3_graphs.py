"""EAGLE-3 for engines that have a graph of their own for the head. What such a graph leaves out is
refused here: the engine would draft without it and say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftsmith.errors import UserError

NUM_TAPS = 3


class Reader(NamedTuple):
    """An engine with a graph of its own for the head: one layer and `NUM_TAPS` taps.

    Args:
        passes_over: settings that it ignores, with the draft that it would run instead.
        single: why it has one layer.
    """

    engine: str
    passes_over: Mapping[str, str]
    single: str


def check_represented(config: dict[str, Any], reader: Reader) -> None:
    """Raises `UserError` where `reader` would run another draft than `config` describes."""
    for key, instead in reader.passes_over.items():
        if config.get(key):
            raise UserError(
                f"the draft has {key}=true, which {reader.engine} passes over: {instead}; train it "
                f"with eagle3.{key}=false"
            )
    taps = config["eagle_aux_hidden_state_layer_ids"]
    if len(taps) != NUM_TAPS:
        raise UserError(
            f"the draft taps layers {taps}, and {reader.engine} reads exactly {NUM_TAPS}; train it "
            "with eagle3.taps of three layers"
        )
    if config["num_hidden_layers"] != 1:
        raise UserError(
            f"the draft has num_hidden_layers={config['num_hidden_layers']}, and {reader.engine} "
            f"{reader.single}; export it --to vllm"
        )
