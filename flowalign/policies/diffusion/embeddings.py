"""The embeddings of prompts on disk, so that a later start neither loads nor runs the text encoders for them."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rewards.hub import hub

ENCODING = ("text_encoder", "tokenizer")
"""Beginnings of the names of the parts that encode prompts."""


class EmbeddingStore:
    """A folder of safetensors files, one a prompt, that several processes and runs may share.

    A file's name is a digest of the text and of all that its embeddings follow from: the encoders' files (their sizes
    and times, of a hub name the commit), dtype, kind of device, and the settings of the encoding.

    Args:
        folder: made when something is written.
        path: folder, hub name or single file that the encoders come from.
        settings: further ones that the embeddings depend on, as JSON has them.
    """

    def __init__(self, folder: str | Path, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.origin = [_origin(path), dict(settings)]

    def read(self, text: str, negative: bool) -> dict[str, Tensor] | None:
        """Embeddings of a prompt by name, without a batch axis; None where there are none."""
        file = self._file(text, negative)
        if not file.is_file():
            return None
        with safe_open(file, "pt") as opened:
            # in the order of the encoding, which safetensors sorts
            return {name: opened.get_tensor(name) for name in json.loads(opened.metadata()["names"])}

    def write(self, text: str, negative: bool, embeddings: Mapping[str, Tensor]) -> None:
        """Keep the embeddings of a prompt, contiguous tensors; readers see the whole file or none."""
        file = self._file(text, negative)
        file.parent.mkdir(parents=True, exist_ok=True)
        # of a name of its own: other processes may write the same
        handle, partial = tempfile.mkstemp(prefix=".partial-", dir=file.parent)
        os.close(handle)
        try:
            save_file(dict(embeddings), partial, {"prompt": text, "names": json.dumps(list(embeddings))})
            os.chmod(partial, 0o644)
            os.replace(partial, file)
        finally:
            Path(partial).unlink(missing_ok=True)

    def _file(self, text: str, negative: bool) -> Path:
        key = json.dumps([*self.origin, text, negative], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.safetensors"


def _origin(path: str | Path) -> list[Any]:
    """Identity of text encoders."""
    root = Path(path)
    if not root.exists():
        _, commit = DiffusionPipeline.load_config(**hub(path), return_commit_hash=True)
        return [str(path), commit]
    entries = [file for file in root.rglob("*") if file.relative_to(root).parts[0].startswith(ENCODING)]
    files = sorted(file for file in entries if file.is_file()) if root.is_dir() else [root]
    stats = [(file, file.stat()) for file in files]
    return [[file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
