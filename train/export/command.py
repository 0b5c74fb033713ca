"""`draftsmith export`: a trained draft in the layout another engine loads, checked against its
rules, with a model card."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from safetensors import SafetensorError

from draftsmith.config import for_others
from draftsmith.drafters.checkpoint import RECORD, SCHEMA_VERSION, locate, read_metadata, trained_k
from draftsmith.drafters.layouts import hub
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.registry import family_of
from draftsmith.drafters.target.load import adapter_base, load_tokenizer
from draftsmith.drafters.vocabulary import tokenizer_difference
from draftsmith.drafters.weights import read_config
from draftsmith.errors import UserError, first_line
from draftsmith.files import atomic_folder, read_json, write_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.evaluate.picture import draw_figures
from draftsmith.train.export.model_card import CURVES, RESULTS, evaluations, model_card
from draftsmith.train.export.source import ExportSource
from draftsmith.train.export.table import TARGET_WRITERS, needs_target_weights, writer, writer_name
from draftsmith.train.export.vllm_faults import SHARED_NOISE
from draftsmith.train.quiet import quiet


def run(config: ExportConfig) -> int:
    out = Path(config.out)
    quiet()
    source = open_source(config)
    write = writer(writer_name(source.family, config.to))
    with on_disk(out), atomic_folder(out) as folder:
        write(source, folder)
        if config.with_target:
            writer(TARGET_WRITERS[config.to])(source, folder)
        write_json(folder / RECORD, shown_record(config, source))
        copy_pictures(source, folder)
        card = model_card(source, folder, engine=config.to, repository=config.push)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"wrote {source.family} for {config.to} to {out}; its README.md says how to serve it")
    if (warning := SHARED_NOISE.sentence(source.family)) in card:
        print(warning)
    if config.push is not None:
        address = push(
            out,
            config.push,
            private=config.private,
            message=f"{source.family} draft for {source.target_name}",
        )
        print(f"pushed to {address}")
    return 0


def shown_record(config: ExportConfig, source: ExportSource) -> dict[str, Any]:
    """The record without places of this machine. Only on the Hub that goes for the target, too:
    a later export of this one looks for it."""
    hidden = ("training", "evaluation", *(["target"] if config.push is not None else []))
    shown = {key: for_others(one) for key, one in source.metadata.items() if key in hidden}
    return {**source.metadata, **shown, "export": {"layout": config.to}}


@contextmanager
def on_disk(out: Path) -> Iterator[None]:
    """Turns a full disk into a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the export to {str(out)!r} cannot be written ({first_line(error)}); make room, or "
            "give another --out"
        ) from error


def copy_pictures(source: ExportSource, folder: Path) -> None:
    """Curves of the training, and the evaluations drawn where matplotlib is installed."""
    if (curves := source.draft / CURVES).is_file():
        shutil.copyfile(curves, folder / CURVES)
    found = evaluations(source.metadata)
    if found and importlib.util.find_spec("matplotlib") is not None:
        draw_figures(found, folder / RESULTS)


def open_source(config: ExportConfig) -> ExportSource:
    draft = locate(config.draft)
    metadata = record_of(draft)
    target_name = config.target or recorded_target(metadata, draft)
    writes = config.with_target or needs_target_weights(metadata["family"], config.to)
    target = locate(target_name, "target", weights=writes)
    base = adapter_base(target)
    if base is not None and writes:
        raise UserError(
            f"target {target_name!r} is an adapter of {base!r}, and this export holds weights of "
            "the target; merge the two into a folder and give that as --target"
        )
    model = target if base is None else locate(base, "target", weights=False)
    check_tokenizer(metadata, target, target_name, trust_remote_code=config.trust_remote_code)
    return ExportSource(
        draft=draft,
        family=metadata["family"],
        config=read_config(draft),
        metadata=metadata,
        target=target,
        trust_remote_code=config.trust_remote_code,
        target_name=hub.split_revision(target_name)[0],  # engines' files have no revision
        target_config=read_json(model / "config.json", "target config"),
        num_speculative_tokens=config.speculative_tokens or trained_k(draft) or 3,
        out=Path(config.out),
    )


def record_of(draft: Path) -> dict[str, Any]:
    """A draft made elsewhere has no record; its family shows in its configuration."""
    if (draft / RECORD).is_file():
        return read_metadata(draft)
    family = family_of(DraftFolder(draft))
    return {
        "schema": SCHEMA_VERSION,
        "family": family,
        "target": {},
        "training": {},
        "evaluation": [],
    }


def recorded_target(metadata: dict[str, Any], draft: Path) -> str:
    name = metadata["target"].get("name")
    if not name:
        raise UserError(f"draft {str(draft)!r} does not say which target it is for; give --target")
    return name


def check_tokenizer(
    metadata: dict[str, Any], target: Path, target_name: str, *, trust_remote_code: bool
) -> None:
    made_for = metadata["target"]
    if "tokenizer_hash" not in made_for:
        return
    if difference := tokenizer_difference(
        made_for, load_tokenizer(target, trust_remote_code=trust_remote_code)
    ):
        raise UserError(
            f"the draft was made for another tokenizer than that of {target_name!r} "
            f"({difference}); give its own target"
        )


# An upload that the storage refuses comes as a RuntimeError, one that the Hub's answers make no
# sense of as a ValueError.
FAILURES = (*hub.FAILURES, RuntimeError, ValueError)


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Uploads the folder, creating the repository if it is new. Returns its address.

    Large files go up one by one, and one that is there already is not sent again; then a single
    commit shows all of them. So a failed upload leaves no half draft, and another try goes on where
    it ended.
    """
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=created.repo_id, commit_message=message)
    except FAILURES as error:
        raise UserError(
            f"the upload to {repository!r} failed ({reason(error)}); {str(folder)!r} is complete, "
            "run --push again"
        ) from error
    return str(created)


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of it."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
