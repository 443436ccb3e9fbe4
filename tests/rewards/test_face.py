"""What becomes of the faces that insightface finds; the package itself is stood in for."""

import sys
import types

import numpy as np
import pytest
from PIL import Image

from rewards import RewardError, score
from rewards.face import FaceIdentity


class Analysis:
    """Finds a face for each channel that is bright: red is large and says (1, 0), green is small and says (0, 1)."""

    def __init__(self, **settings):
        assert settings == {"name": "buffalo_l", "allowed_modules": ["detection", "recognition"]}

    def prepare(self, ctx_id, det_thresh):
        assert det_thresh == 0.5

    def get(self, picture):
        blue_green_red = picture[0, 0]
        known = ((2, (0, 0, 8, 8), (1.0, 0.0)), (1, (0, 0, 4, 4), (0.0, 1.0)), (0, (0, 0, 2, 2), (0.6, 0.8)))
        return [
            types.SimpleNamespace(bbox=np.array(box), normed_embedding=np.array(vector))
            for channel, box, vector in known
            if blue_green_red[channel] > 100
        ]


def plain(*colour):
    return Image.new("RGB", (8, 8), colour)


def test_the_largest_faces_cosine_to_the_references(monkeypatch):
    monkeypatch.setitem(sys.modules, "insightface", types.ModuleType("insightface"))
    monkeypatch.setitem(sys.modules, "insightface.app", types.SimpleNamespace(FaceAnalysis=Analysis))
    reward = FaceIdentity()
    samples = [plain(255, 0, 0), plain(0, 255, 0), plain(255, 255, 0), plain(0, 0, 0), plain(0, 0, 255)]
    reference = [{"reference": plain(255, 0, 0)}] * 5
    scores = score(reward, samples, ["x"] * 5, reference)
    assert scores.value.tolist() == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.6])
    assert scores.parts["found"].tolist() == [1, 1, 1, 0, 1]
    with pytest.raises(RewardError, match="the reference picture of the prompt 'x' shows no face"):
        score(reward, samples[:1], ["x"], [{"reference": plain(0, 0, 0)}])


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "insightface", None)
    with pytest.raises(ValueError, match=r"pip install 'flowalign\[face\]'"):
        FaceIdentity()
