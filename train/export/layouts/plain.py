"""A draft LM as a plain model folder: any engine or transformers loads it as a small causal LM."""

from __future__ import annotations

import shutil
from pathlib import Path

from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.vocabulary import check_same_ids
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import Source, text_config, weight_files, write_config
from draftsmith.train.export.layouts.tokenizer import copy_tokenizer


def write_plain(source: Source, out: Path) -> None:
    check(source)
    for file in weight_files(source.draft):
        shutil.copyfile(file, out / file.name)
    index = source.draft / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, out / index.name)
    write_config(out, source.config)
    copy_tokenizer(source.target, out)


def check(source: Source) -> None:
    own, target = text_config(source.config)["vocab_size"], text_config(source.target_config)["vocab_size"]
    if own != target:
        raise UserError(
            f"the draft has {own} token ids and {source.target_name!r} has {target}; engines ask for the same number, so train a "
            "draft with the target's vocabulary"
        )
    if any((source.draft / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        trust = source.trust_remote_code
        own, target = (load_tokenizer(folder, trust_remote_code=trust) for folder in (source.draft, source.target))
        check_same_ids(own, target)
    read_weights(source.draft)  # refuses damaged and non-finite ones
