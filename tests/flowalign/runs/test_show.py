import numpy as np
from PIL import Image

from flowalign.runs.show import SIDE, Grid

PROMPT = "a small red circle to the left of a large blue square and a green triangle above both of"


def drawn(*captions: str) -> Image.Image:
    return Grid([[Image.new("RGB", (32, 32), "white")] * len(captions)], [captions]).image


def test_a_prompt_of_a_sentence_is_written_to_its_end() -> None:
    assert drawn(PROMPT + " them").tobytes() != drawn(PROMPT + " those").tobytes()
    assert drawn(PROMPT).height > drawn("a circle").height > SIDE


def test_captions_stay_below_their_own_picture() -> None:
    left = np.asarray(drawn(PROMPT + " " + "x" * 60, ""))
    assert (left[:, : SIDE + 16] < 128).any() and (left[:, SIDE + 16 :] > 200).all()


def test_a_page_of_text_does_not_make_a_page_of_caption() -> None:
    assert drawn("word " * 500).height == drawn("word " * 100).height
