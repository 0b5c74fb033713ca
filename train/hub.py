"""Uploads to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.errors import UserError


def check_repository(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a Hub repository name; give --push user/repo") from error


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Uploads the folder, creating the repository if it is new. Returns its address."""
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=created.repo_id, commit_message=message)
    except (HfHubHTTPError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"the upload to {repository!r} failed ({reason}); {str(folder)!r} is complete, run --push again"
        ) from error
    return str(created)
