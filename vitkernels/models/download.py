"""Refuse to download weights from a hub that cannot be reached, at once: the hub's client retries for a minute."""

import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from vitkernels.errors import UsageError

CONNECT_SECONDS = 5.0


def check_download(name: str, pretrained_cfg: dict[str, Any]) -> None:
    """Raise UsageError (models.download) if the weights are neither cached nor reachable.

    Args:
        name: the model's name, for the message.
        pretrained_cfg: timm's configuration of the weights; only those of the Hugging Face hub are checked.
    """
    repository = pretrained_cfg.get("hf_hub_id")
    if not pretrained_cfg:
        raise UsageError(f"model {name!r} has no pretrained weights", code="models.download", name=name, reason="none")
    if not repository or pretrained_cfg.get("file") or _is_cached(repository):
        return
    reason = _unreachable(constants.ENDPOINT)
    if reason is not None:
        raise download_error(name, reason)


def download_error(name: str, reason: str) -> UsageError:
    """Return the error for weights that could not be fetched."""
    return UsageError(
        f"could not fetch the pretrained weights of model {name!r}: {reason.rstrip('.')}. Fetch them once with network "
        "access (the cache is in HF_HOME), or load a local file of weights",
        code="models.download",
        name=name,
        reason=reason,
    )


def _is_cached(repository: str) -> bool:
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    return any(path.is_file() for path in (folder / "snapshots").glob("*/*"))


def _unreachable(endpoint: str) -> str | None:
    """Return why a connection to the host fails; None if it succeeds, or if a proxy connects for us."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and they are not cached"
    url = urllib.parse.urlsplit(endpoint)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    proxies = urllib.request.getproxies()
    if (url.scheme in proxies or "all" in proxies) and not urllib.request.proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"cannot connect to {host} ({error.strerror or error})"
    return None
