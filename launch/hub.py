"""A model id of the Hugging Face hub -> its snapshot folder in that library's own cache.

Token, endpoint, cache and offline mode are the library's usual variables (HF_TOKEN, HF_ENDPOINT,
HF_HOME, HF_HUB_OFFLINE). Only data files are fetched: never pickles, never code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from huggingface_hub import constants, snapshot_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from launch.progress import Progress
from protocol.checkpoints.folder import check_folder
from protocol.errors import (
    CheckpointError,
    ConfigError,
    DaemonError,
    ModelNotFound,
    PermissionRefused,
    Unavailable,
)

# The HTTP client differs between releases (requests, httpx, httpx2); its error is imported there.
HTTPError: Final[type[Exception]] = getattr(hub_errors, "HTTPError", HfHubHTTPError)
ALLOWED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*")


def fetch_from_hub(
    name: str,
    progress: Progress,
    *,
    allow_pull: bool,
    check: Callable[[Path], None] = check_folder,
) -> tuple[Path, bool]:
    """(folder, whether anything was fetched) for `owner/name` or `owner/name@revision`.

    `check` raises for a folder that lacks something.

    A complete snapshot in the cache is used as it is, without asking the network.
    """
    repository, _, revision = name.partition("@")
    cached = _cached(repository, revision or None, check)
    if cached is not None:
        return cached, False
    if not allow_pull:
        raise ModelNotFound(f"{name} is not in the cache of the hub; `dflashd pull {name}`")
    progress.note(f"fetching {name} from the hub")
    if not progress.shows_bars:
        disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(ALLOWED))
        )
    except (HfHubHTTPError, HTTPError, HFValidationError, OSError, ValueError) as error:
        raise _typed(name, error) from error
    check(folder)
    return folder, True


def _cached(repository: str, revision: str | None, check: Callable[[Path], None]) -> Path | None:
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(ALLOWED),
                local_files_only=True,
            )
        )
        check(folder)
    except (LocalEntryNotFoundError, HFValidationError, ConfigError, OSError, ValueError):
        return None
    return folder


def _typed(name: str, error: Exception) -> DaemonError:
    """The first matching line decides: the specific errors derive from the general ones."""
    first = str(error).strip().splitlines()[0][:300] if str(error).strip() else repr(error)
    match error:
        case GatedRepoError():
            return PermissionRefused(
                f"{name} is gated: accept its terms on the hub and set HF_TOKEN ({first})"
            )
        case RepositoryNotFoundError():
            return ModelNotFound(f"the hub has no model {name}, or it is private: set HF_TOKEN")
        case RevisionNotFoundError():
            return ModelNotFound(f"{name}: the hub has no such revision")
        case HFValidationError():
            return ModelNotFound(f"{name} is no valid hub id: {first}")
        case _ if constants.is_offline_mode():
            return Unavailable(
                f"{name} is not in the cache of the hub, and HF_HUB_OFFLINE forbids to fetch it"
            )
        case _ if (status := _status(error)) is not None:
            return Unavailable(f"the hub at {constants.ENDPOINT} answered {status} for {name}")
        case LocalEntryNotFoundError() | ConnectionError() | TimeoutError() | HTTPError():
            return Unavailable(
                f"the hub at {constants.ENDPOINT} cannot be reached; {name} was not fetched"
            )
        case OSError():
            return Unavailable(f"cannot fetch {name} from the hub: {first}")
        case _:
            return CheckpointError(f"{name}: {first}")


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error: the library may raise another one because of it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None
