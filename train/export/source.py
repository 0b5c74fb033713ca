"""Source of an export: a draft checkpoint and the target it was trained for, read without loading a
model; and the files that every layout copies or writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftsmith.drafters.checkpoint import locate, one_sentence
from draftsmith.drafters.draft_shape import windows_in
from draftsmith.drafters.heads.mtp import READS_FINAL
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.load import adapter_base, build_model, load_config
from draftsmith.drafters.weights import safe_files, stored_tensors, weight_files
from draftsmith.errors import UserError
from draftsmith.train.objective.outline import TargetOutline


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    draft: Path  # the draft's folder
    family: str
    config: dict[str, Any]  # the draft's config.json
    metadata: dict[str, Any]  # the draft's draftsmith.json
    target: Path  # the target's folder
    trust_remote_code: bool  # whether code that either folder brings may be run
    target_name: str  # as the user would type it: a Hub id or a path
    target_config: dict[str, Any]  # the target's config.json
    num_speculative_tokens: int
    out: Path  # where the export will be found

    @cached_property
    def outline(self) -> TargetOutline:
        """The target without its weights."""
        config = load_config(self.target, trust_remote_code=self.trust_remote_code)
        with torch.device("meta"):
            model = build_model(config, trust_remote_code=self.trust_remote_code)
        return TargetOutline(
            model,
            self.target_name,
            revision="",
            place=torch.device("cpu"),
            trust_remote_code=self.trust_remote_code,
        )

    @cached_property
    def drafter(self) -> Any:
        """The draft as it is served, in its family's class. Raises `UserError` for one that is not
        for the target."""
        with one_sentence(self.draft):
            return FAMILIES[self.family].load(self.draft, self.outline)

    @property
    def is_stitched(self) -> bool:
        """True where the export is the target with the draft in it."""
        return self.family == "mtp" and not self.config.get(READS_FINAL)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights, from the file headers alone."""
    return {
        name: info.shape
        for file in weight_files(folder)
        for name, info in stored_tensors(file).items()
    }


def target_tensor(source: ExportSource, ending: str) -> torch.Tensor:
    """The target's tensor of this name, whatever the name of the language model in it."""
    for file in safe_files(source.target):
        for name in stored_tensors(file):
            if name.endswith(ending) and "visual" not in name:
                with safe_open(file, framework="pt") as weights:
                    return weights.get_tensor(name)
    raise UserError(
        f"{source.target_name!r} has no weight {ending!r}, which engines look for; train an eagle3 "
        "draft"
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json, which multimodal models nest."""
    return config.get("text_config", config)


def check_sees_all(source: ExportSource, engine: str) -> None:
    """Refuse a draft with sliding windows, which `engine` would run without them."""
    if windows_in({"num_hidden_layers": 1, **source.config}):
        raise UserError(
            f"the draft has sliding_window={source.config['sliding_window']}, and {engine} would "
            "let it attend to all of the text, which it has not learned; export an eagle3 draft "
            "--to vllm, or train without a window"
        )


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def copy_tokenizer(target: Path, out: Path) -> None:
    """The target's tokenizer, so that the folder serves and loads by itself; of an adapter without
    one, its base's."""
    base = adapter_base(target)
    if base is not None and not (target / "tokenizer_config.json").is_file():
        target = locate(base, "target", weights=False)
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, out / name)
