"""The target's tokenizer as OpenVINO GenAI reads it: one graph for each direction."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.errors import UserError, first_line
from draftsmith.train.export.layouts.source import ExportSource, copy_tokenizer
from draftsmith.train.export.openvino.graph import library

FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")


def write_tokenizer(source: ExportSource, out: Path) -> None:
    tokenizers, ov = library("openvino_tokenizers"), library()
    tokenizer = load_tokenizer(source.target, trust_remote_code=source.trust_remote_code)
    try:
        graphs = tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {str(source.target)!r} is not one that openvino_tokenizers "
            f"converts ({first_line(error)}); export the draft --to vllm"
        ) from error
    for graph, name in zip(graphs, FILES, strict=True):
        ov.save_model(graph, out / name, compress_to_fp16=False)
    copy_tokenizer(source.target, out)
