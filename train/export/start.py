"""Start of `draftsmith export`: what it cannot write is an error at once, before torch and
transformers, which take seconds to import."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.config import check_limits
from draftsmith.drafters.layouts.hub import check_named
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.progress import loading
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.table import TARGET_WRITERS, writer_name

RECORD = "draftsmith.json"


def run(config: ExportConfig) -> int:
    check_options(config)
    record = Path(config.draft) / RECORD
    if record.is_file() and (family := read_json(record, "draft record").get("family")):
        writer_name(family, config.to)
    check_out(config)
    check_named(config)
    with loading():
        from draftsmith.train.export.command import run as export

    return export(config)


def check_options(config: ExportConfig) -> None:
    check_limits(config)
    if config.push is not None:
        try:
            validate_repo_id(config.push)
        except HFValidationError as error:
            raise UserError(
                f"{config.push!r} is not a Hub repository name; give --push user/repo"
            ) from error
    if config.with_target and config.to not in TARGET_WRITERS:
        raise UserError(
            f"--with-target is for {' and '.join(TARGET_WRITERS)}; for {config.to} leave it out, "
            "the target is read from where it lies"
        )


def check_out(config: ExportConfig) -> None:
    """Replaces an earlier export; refuses any other folder that holds files."""
    out = Path(config.out)
    if out.resolve() in (Path(config.draft).resolve(), Path(config.target or out / "-").resolve()):
        raise UserError(f"--out {str(out)!r} is where the export is read from; give another folder")
    occupied = out.is_file() or (out.is_dir() and any(out.iterdir()))
    record = out / RECORD
    if occupied and not (record.is_file() and "export" in read_json(record, "draft record")):
        raise UserError(f"--out {str(out)!r} exists and is no earlier export; give another folder")
