"""Uploads to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from draftsmith.errors import UserError


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Uploads the folder, creating the repository if it is new. Returns its address."""
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=created.repo_id, commit_message=message)
    except HFValidationError as error:
        raise UserError(f"{repository!r} is not a Hub repository name; give --push user/repo") from error
    except (HfHubHTTPError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"the upload to {repository!r} failed ({reason}); {str(folder)!r} is complete, run --push again"
        ) from error
    return str(created)
