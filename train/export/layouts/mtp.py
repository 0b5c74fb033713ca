"""An MTP module as part of its target's folder, which engines serve with `method: mtp`: in the layout it came in, or MiMo's."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.heads.appended_names import is_appended
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.mimo import write_stitched
from draftsmith.train.export.layouts.source import Source, tensor_shapes, write_config
from draftsmith.train.export.layouts.stitch import stitch
from draftsmith.train.export.layouts.tokenizer import copy_tokenizer


def write_mtp(source: Source, out: Path) -> None:
    write = write_back if is_appended(source.config) else write_stitched
    write(source, out)


def write_back(source: Source, out: Path) -> None:
    """A module of one layer more in the place of the one that the target brought along. What is shared with the target stays."""
    module = read_weights(source.draft)
    shapes = tensor_shapes(source.target)
    for name, tensor in module.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise UserError(
                f"weight {name!r} of the MTP draft has shape {list(tensor.shape)} and {source.target_name!r} "
                f"{'none such' if name not in shapes else list(shapes[name])}; give --target the folder that it was trained from"
            )
    stitch(source.target, out, module, replaces=module.__contains__)
    write_config(out, source.target_config)
    copy_tokenizer(source.target, out)
