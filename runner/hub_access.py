"""What the hub says of the repository before anything is downloaded, and what of it the cache holds."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, repo_folder_name

from runner.doctor_text import without_passwords
from runner_models import HUB_REPOSITORY

SECONDS = 5.0
"""How long the hub may take to answer; the name look-up is counted too, which no HTTP timeout bounds."""


@dataclass(frozen=True)
class HubAccess:
    """`access` is "granted", "refused", "unreachable" or "offline"; `reason` says why it is not granted."""

    access: str
    token: bool
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON types; of the token only whether there is one."""
        return {"repository": HUB_REPOSITORY, "access": self.access, "reason": self.reason, "token": self.token}


def hub_access(*, revision: str | None, seconds: float = SECONDS) -> HubAccess:
    """Ask the hub for the head of one file that every run reads; answers within `seconds`, also without a network."""
    token = huggingface_hub.get_token() is not None
    if constants.is_offline_mode():
        return HubAccess("offline", token, "HF_HUB_OFFLINE is set")
    answer: list[HubAccess] = []
    thread = threading.Thread(target=lambda: answer.append(_ask(revision, token, seconds)), daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return answer[0] if answer else HubAccess("unreachable", token, f"no answer within {seconds:g} s")


def _ask(revision: str | None, token: bool, seconds: float) -> HubAccess:
    url = hf_hub_url(HUB_REPOSITORY, "model_index.json", revision=revision)
    page = f"https://huggingface.co/{HUB_REPOSITORY}"
    # No network, no such host and a refused connection are errors of the HTTP client, whose base this is.
    errors: tuple[type[Exception], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
    try:
        get_hf_file_metadata(url, timeout=seconds)
    except GatedRepoError:
        todo = "the account of this token has not accepted its terms" if token else "no token is set"
        return HubAccess("refused", token, f"it is gated and {todo}: see {page}")
    except RevisionNotFoundError:
        return HubAccess("refused", token, f"--revision {revision} is no commit or branch of it")
    except RepositoryNotFoundError:
        return HubAccess("refused", token, "it does not exist, or is not visible to this token")
    except OfflineModeIsEnabled:
        return HubAccess("offline", token, "HF_HUB_OFFLINE is set")
    except errors as error:
        words = without_passwords((str(error).splitlines() or [""])[0])  # httpx names the URL with its password
        return HubAccess("unreachable", token, f"{type(error).__name__}: {words}")
    return HubAccess("granted", token)


def hub_cache() -> Path:
    """Where downloads go."""
    return Path(constants.HF_HUB_CACHE)


def cached_bytes() -> int:
    """Bytes of the repository that lie in the cache already, whole or not."""
    blobs = hub_cache() / repo_folder_name(repo_id=HUB_REPOSITORY, repo_type="model") / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*")) if blobs.is_dir() else 0
