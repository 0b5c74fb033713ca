"""The MLP speculator as IBM's checkpoints have it: the draft's own files."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.layouts.source import Source, text_config


def write_plain(source: Source, out: Path) -> None:
    target = text_config(source.target_config)
    for key, own in (("vocab_size", "vocab_size"), ("hidden_size", "emb_dim")):
        if source.config.get(own) != target[key]:
            raise UserError(
                f"the draft was made for a target with {key} {source.config.get(own)}, {source.target_name!r} has {target[key]}"
            )
    write_weights(out, source.config, read_weights(source.draft))
