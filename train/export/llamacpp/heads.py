"""EAGLE-3 as llama.cpp reads it: one layer, three taps, and no norm that it lacks."""

from __future__ import annotations

from pathlib import Path

from draftsmith.train.export.layouts.eagle3_graphs import Reader, check_represented
from draftsmith.train.export.layouts.portable import check_eagle3
from draftsmith.train.export.layouts.source import ExportSource, check_sees_all
from draftsmith.train.export.llamacpp.file import DRAFT, Gguf, write_gguf
from draftsmith.train.export.llamacpp.lm import write_target
from draftsmith.train.export.llamacpp.shape import (
    absolute_ids,
    interleaved,
    named,
    rope_factors,
    shape_values,
    without,
)
from draftsmith.train.export.llamacpp.vocabulary import vocabulary

READER = Reader(
    "llama.cpp",
    passes_over={
        "norm_output": "it would feed the state back without its norm and lose later depths",
        "fc_norm": "it would join the taps without their norms",
    },
    single="runs one layer",
)


def write_eagle3(source: ExportSource, out: Path) -> None:
    check_eagle3(source)
    written, config = source.drafter.portable_config(), source.drafter.config
    check_represented(written, READER)
    check_sees_all(source, READER.engine)
    values = shape_values(config) | {
        "target_layers": written["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": written["target_hidden_size"],
        "norm_before_residual": written["norm_before_residual"],
        "norm_before_fc": written["norm_before_fc"],
    }
    stored = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in source.drafter.state_dict().items()
    }
    tensors = named(without(stored, ("d2t", "t2d")), {"fc": "fc", "input_norm": "enc.output_norm"})
    tensors = interleaved(tensors, values) | rope_factors(config)
    if "d2t" in stored:
        tensors["d2t"] = absolute_ids(stored["d2t"])
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=source.trust_remote_code)
    write_gguf(out / DRAFT, Gguf("eagle3", values | words, tensors), name=source.draft.name)
    write_target(source, out)
