"""Upload a model's folder to the Hugging Face hub."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Weight files that an earlier upload may have left. They are deleted, because transformers would mix them with the new.
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json", "model-bf16.gguf", "model-q8_0.gguf"]


def check_upload(repo_id: str, private: bool, said: str) -> None:
    """Check, before training, that a model can be uploaded. Nothing is created on the hub.

    Args:
        repo_id: OWNER/NAME, or NAME for a repository of the user's own.
        private: whether the repository must be private.
        said: the option that requests the upload, for messages.

    Raises:
        UserError: `repo_id` is not an id; the hub is disabled or cannot be reached; no token may write to OWNER's
            repositories; or the repository exists and is public although `private` is set.
    """
    # In the functions of this file, because most runs upload nothing and huggingface_hub takes long to import.
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    wanted = f"{said}={repo_id}"
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{wanted}: {error}") from error
    if is_offline_mode():
        raise UserError(f"{wanted}: HF_HUB_OFFLINE is set, which disables uploads; unset it, or do not upload")
    login = "run `hf auth login` with a token that may write, or set HF_TOKEN"
    api = HfApi()
    try:
        account = api.whoami()
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(f"{wanted}: the token of {account['name']} may only read; {login}")
        owner, others = repo_id.partition("/")[0], [org["name"] for org in account.get("orgs", ())]
        if "/" in repo_id and owner.lower() not in (name.lower() for name in (account["name"], *others)):
            member = f", which belongs to {', '.join(others)}" if others else ""
            raise UserError(
                f"{wanted}: the token is of {account['name']}{member}, and may not write to {owner}; {login}"
            )
        if private and not _is_private(api, repo_id if "/" in repo_id else f"{account['name']}/{repo_id}"):
            raise UserError(
                f"{wanted}: the repository exists and is public; choose another name, make it private on the hub, or "
                "upload without private"
            )
    except LocalTokenNotFoundError as error:
        raise UserError(f"{wanted}: the hub needs a token for uploads; {login}") from error
    except HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403)
        raise UserError(f"{wanted}: {_reason(error)}{f'; {login}' if refused else ''}") from error
    except UserError:
        raise
    except Exception as error:  # network failures reach us as many unrelated exception types
        raise UserError(f"{wanted}: {api.endpoint} cannot be reached: {_reason(error)}") from error


def upload(folder: Path, repo_id: str, private: bool = False) -> str:
    """Upload a folder, and create its repository if necessary; return its URL.

    Weight files of an earlier upload that the folder does not replace are removed from the repository. Others stay.

    Raises UserError, with the command for another attempt, if the upload fails. The local folder stays unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    stale = _WEIGHTS if any(folder.glob("model*.safetensors")) else None
    try:
        repo = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id, folder_path=folder, delete_patterns=stale, commit_message="Upload by jaxtune"
        )
    except Exception as error:  # network failures reach us as many unrelated exception types
        again = f"hf upload {shlex.quote(repo_id)} {shlex.quote(str(folder))} .{' --private' if private else ''}"
        raise UserError(
            f"{folder} was not uploaded to {repo_id}: {_reason(error)}. The folder is complete; upload it with: {again}"
        ) from error
    return str(repo)


def _is_private(api: "HfApi", repo_id: str) -> bool:
    """Whether a repository is private, or does not exist yet."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return bool(api.model_info(repo_id).private)
    except RepositoryNotFoundError:
        return True


def _reason(error: Exception) -> str:
    """The error's text in one line, without the queries of URLs, which hold signatures."""
    return re.sub(r"\?[^\s'\"]+", "", " ".join(str(error).split())) or type(error).__name__
