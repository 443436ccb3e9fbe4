"""Files of other authors that are not shipped: fetched once, by address and digest, or named by the user."""

import hashlib
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from flowalign.errors import ConfigError


@dataclass(frozen=True)
class Published:
    """A file of a repository at a fixed commit."""

    repository: str
    """Repository on GitHub, owner/name."""
    commit: str
    path: str
    licence: str
    sha256: str | None = None

    @property
    def address(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"


def located(file: Published, given: str | None, setting: str) -> Path:
    """Path of a published file: the user's copy, or a file in the hub's cache, which is fetched if it is missing.

    Args:
        given: path of the user's copy, if there is one.
        setting: name of the setting for such a copy, for messages.

    Raises:
        ConfigError: the file is missing and cannot be fetched, or has another digest.
    """
    if given is not None:
        if not Path(given).is_file():
            raise ConfigError(f"{setting}: no file at {given}")
        return Path(given)
    path = Path(constants.HF_HOME) / "flowalign" / file.repository / file.commit / file.path
    if not path.is_file():
        _fetch(file, path, setting)
    return path


def _fetch(file: Published, path: Path, setting: str) -> None:
    subject = f"{file.address} (licence: {file.licence}) is not shipped with flowalign"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{subject}, and this machine is offline; --set {setting}=FILE names a copy")
    try:
        with urllib.request.urlopen(file.address, timeout=60) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise ConfigError(f"{subject} and cannot be fetched: {error}; --set {setting}=FILE names a copy") from error
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise ConfigError(f"{file.address} is not what was published: its SHA-256 is another; --set {setting}=FILE")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    partial.write_bytes(content)
    os.replace(partial, path)


def lines(path: Path) -> Sequence[str]:
    """The lines of a list of prompts that are not blank, without spaces at their ends."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
