"""Uploads to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.errors import UserError, first_line

try:
    # The HTTP library of huggingface_hub 2; its errors do not derive from httpx's.
    from httpx2 import HTTPError
except ImportError:
    from httpx import HTTPError

# An upload that the storage refuses comes as a RuntimeError, one that the Hub's answers make no
# sense of as a ValueError.
FAILURES = (HfHubHTTPError, HTTPError, OSError, RuntimeError, ValueError)


def check_repository(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a Hub repository name; give --push user/repo") from error


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
