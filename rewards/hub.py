"""Where weights of the hub are: 'owner/repository', or 'owner/repository@revision' for a branch, a tag or a commit."""

import os
import re
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parents[1] / "flowalign" / "data" / "assets"
"""Models that come with flowalign."""
AT = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)")


def split_revision(source: str | Path) -> tuple[str, str | None]:
    """The name without its revision, and the revision; None of a folder, and of a name that has none."""
    match = AT.fullmatch(str(source))
    if match is None or os.path.exists(source):
        return str(source), None
    return match["name"], match["revision"]


def shipped(source: str | Path) -> str:
    """The folder of a model that comes with flowalign, such as 'tiny_lm'; another name or folder as it is."""
    return str(SHIPPED / source if str(source).isidentifier() and (SHIPPED / source).is_dir() else source)


def hub(source: str | Path) -> dict[str, Any]:
    """The arguments of `from_pretrained` and `load_config` that say what to load: folder or name, and its revision."""
    name, revision = split_revision(shipped(source))
    return {"pretrained_model_name_or_path": name} | ({} if revision is None else {"revision": revision})


def failure(error: BaseException) -> str | None:
    """The hub's part in an error of a library, which puts it vaguely; None of other errors."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GatedRepoError):
            return "it is gated: accept its licence on its page of the hub, then `hf auth login` with that account"
        if isinstance(cause, RepositoryNotFoundError):
            return "the hub has no such repository, or it is private (`hf auth login`)"
        if isinstance(cause, LocalEntryNotFoundError):
            return (
                "it is not on this machine, and the hub did not answer; where there is a network, "
                "huggingface_hub.snapshot_download gets it, and so does `flowalign fetch CONFIG`"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def reason(error: BaseException) -> str:
    """Why weights cannot be loaded, in a line."""
    return failure(error) or " ".join(str(error).split())[:300]
