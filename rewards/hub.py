"""Where weights of the hub are: 'owner/repository', or 'owner/repository@revision' for a branch, a tag or a commit."""

import os
import re
from pathlib import Path
from typing import Any

AT = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)")


def split_revision(source: str | Path) -> tuple[str, str | None]:
    """The name without its revision, and the revision; None of a folder, and of a name that has none."""
    match = AT.fullmatch(str(source))
    if match is None or os.path.exists(source):
        return str(source), None
    return match["name"], match["revision"]


def hub(source: str | Path) -> dict[str, Any]:
    """The arguments of `from_pretrained` and `load_config` that say what to load: folder or name, and its revision."""
    name, revision = split_revision(source)
    return {"pretrained_model_name_or_path": name} | ({} if revision is None else {"revision": revision})
