"""Identity of faces: ArcFace embeddings (arXiv 1801.07698) by the package insightface."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from rewards.base import Metadata, RewardError, Scores, Spec, reference_images


class FaceIdentity:
    """Likeness of the face to the reference picture's: cosine of their ArcFace embeddings, in [-1, 1].

    Without a face it is 0. Of several faces in a picture the largest counts. Part `found`: whether the picture shows
    one. The package is MIT-licensed; the models that it downloads are for research that is not commercial.

    Args:
        model: name of a pack of models of insightface, or a folder of ONNX files.
        least: how sure the detector must be of a face, in [0, 1].
    """

    name = "face_identity"
    spec = Spec(frozenset({"image", "reference"}))

    def __init__(self, model: str = "buffalo_l", least: float = 0.5) -> None:
        try:
            from insightface.app import FaceAnalysis
        except ImportError as error:
            raise ValueError("'face_identity' needs insightface; pip install 'flowalign[face]'") from error
        self.faces = FaceAnalysis(name=model, allowed_modules=["detection", "recognition"])
        self.faces.prepare(ctx_id=0, det_thresh=least)

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        goals: dict[bytes, Any] = {}
        values, found = [], []
        for sample, reference, prompt in zip(samples, reference_images(metadata), prompts, strict=True):
            key = reference.tobytes()  # a group has one
            if key not in goals:
                goals[key] = self.embedding(reference)
            if goals[key] is None:
                raise RewardError(f"face_identity: the reference picture of the prompt {prompt!r} shows no face")
            face = self.embedding(sample)
            found.append(float(face is not None))
            values.append(0.0 if face is None else float(face @ goals[key]))
        return Scores(torch.tensor(values), {"found": torch.tensor(found)})

    def embedding(self, image: Image) -> Any:
        """[D] the unit vector of the largest face; None without one."""
        # the package reads pictures as OpenCV does, blue first
        faces = self.faces.get(np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1]))
        if not faces:
            return None
        return max(faces, key=lambda face: _area(face.bbox)).normed_embedding


def _area(box: Any) -> float:
    left, top, right, bottom = box
    return float((right - left) * (bottom - top))
