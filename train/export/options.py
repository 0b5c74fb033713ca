"""Check of the options of `draftsmith export`, before anything is read. Torch-free."""

from __future__ import annotations

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.config import check_limits
from draftsmith.errors import UserError
from draftsmith.train.config import ExportConfig

HOLD_TARGET = ("gguf", "openvino")  # layouts that hold the target beside the draft


def check_options(config: ExportConfig) -> None:
    check_limits(config)
    if config.push is not None:
        try:
            validate_repo_id(config.push)
        except HFValidationError as error:
            raise UserError(
                f"{config.push!r} is not a Hub repository name; give --push user/repo"
            ) from error
    if config.with_target and config.to not in HOLD_TARGET:
        raise UserError(
            f"--with-target is for {' and '.join(HOLD_TARGET)}; for {config.to} leave it out, the "
            "target is read from where it lies"
        )
