"""T2I-CompBench (arXiv 2307.06350): attributes by BLIP-VQA, places by a detector, other relations by CLIP.

Its numbers, depths and complex prompts are left out: they need UniDet and a depth model, which transformers lacks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.benchmarks.published import Published, lines, located
from rewards import Metadata
from rewards.clip import CLIPScore
from rewards.detection import DetectedObject
from rewards.hub import hub
from rewards.vision import Preprocess, pick_device

DIGESTS = {
    "color": "1634259756dbc77d13093d907d414480080ec9790a8c97ad09efaea7b2534f2d",
    "shape": "37e1a276906c7ea9516cbd7ac8501be896006c0c17ca7344f260562834455bae",
    "texture": "fbb5363515b4a28009e360afaaaf389d2dd2289e50dbb0c6ef4ea0c7fe4f3d4f",
    "spatial": "8707a1d7e42ce3002d95363cf55f74bd043c843ae27108f5125aaaa7840ca988",
    "non_spatial": "04c56cc9ac441dc9ea6c5157652058bd1635b5308526dd31bb29a1caab9a758d",
}
COMMIT = "1b7094991a57f3c22abdd4f6e8ba6c1a15517073"
ATTRIBUTES = ("color", "shape", "texture")
NO_THINGS = ("top", "the side", "the left", "the right")
PLACES = (
    *("on side of", "next to", "near", "on the left of", "on the right of", "on the bottom of", "on the top of"),
    "on top of",
)
"""Relations in the authors' order: the first one that is in a prompt counts."""
PEOPLE = ("girl", "boy", "man", "woman")
YES, NO, DECODE, ENCODE = 2748, 2053, 30522, 30523
"""Tokens of BLIP's vocabulary, which is BERT's with two more."""


class T2ICompBench(Suite):
    """T2I-CompBench: five of its categories with 300 prompts each, 10 pictures a prompt; the mean of the attributes.

    Args:
        prompts: a folder with the authors' color_val.txt, shape_val.txt, ...
        vqa: BLIP-VQA for transformers.
        detector: an OWLv2, which finds the objects of 'spatial'. The published figures are of UniDet; figures of
            another detector can only be compared with each other.
        clip: the CLIP model of 'non_spatial'.
        device: device of all of them.
    """

    name = "t2i_compbench"
    version = 2  # 1 showed BLIP-VQA 384 pixels
    pictures = 10
    headline = ATTRIBUTES

    def __init__(
        self,
        prompts: str | None = None,
        vqa: str = "Salesforce/blip-vqa-capfilt-large",
        detector: str = "google/owlv2-base-patch16-ensemble",
        clip: str = "openai/clip-vit-base-patch32",
        device: str = "auto",
    ) -> None:
        self.folder, self.vqa, self.detector, self.clip, self.device = prompts, vqa, detector, clip, device

    def prompts(self) -> Prompts:
        texts, metadata = [], []
        for category, digest in DIGESTS.items():
            file = Published(
                "Karine-Huang/T2I-CompBench", COMMIT, f"examples/dataset/{category}_val.txt", "MIT", digest
            )
            copy = None if self.folder is None else str(Path(self.folder) / f"{category}_val.txt")
            for line in lines(located(file, copy, "t2i_compbench.prompts")):
                texts.append(line)
                metadata.append({"category": category})
        if any(record["category"] in ATTRIBUTES for record in metadata):
            noun_phrases(texts[0])
        return Prompts(texts, metadata)

    @cached_property
    def _blip(self) -> Callable[[Image, str], float]:
        return blip_vqa(self.vqa, self.device)

    @cached_property
    def _detector(self) -> Callable[[Image, Sequence[str]], list[DetectedObject]]:
        return owl(self.detector, self.device)

    @cached_property
    def _clip(self) -> CLIPScore:
        return CLIPScore(model=self.clip, device=self.device)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = zip(samples, prompts, metadata, strict=True)
        return [{record["category"]: self._one(image, prompt, record["category"])} for image, prompt, record in rows]

    def _one(self, image: Image, prompt: str, category: str) -> float:
        if category in ATTRIBUTES:
            return prod(self._blip(image, f"{phrase}?") for phrase in noun_phrases(prompt))
        if category == "spatial":
            return spatial(prompt, self._detector(image, named(prompt)[1]))
        return float(self._clip([image], [prompt], [{}]).value[0]) / self._clip.encoder.scale

    def settings(self) -> Mapping[str, Any]:
        return {"vqa": self.vqa, "detector": self.detector, "clip": self.clip}


def noun_phrases(prompt: str) -> list[str]:
    """Noun phrases of a prompt by spaCy's small English model; each becomes a question about an attribute."""
    try:
        import spacy  # type: ignore[import-not-found]

        model = spacy.load("en_core_web_sm")
    except (ImportError, OSError) as error:
        raise ConfigError(
            "t2i_compbench cuts prompts by spaCy: pip install spacy && python -m spacy download en_core_web_sm"
        ) from error
    return [chunk.text for chunk in model(prompt).noun_chunks if chunk.text not in NO_THINGS]


def named(prompt: str) -> tuple[str, list[str]]:
    """The relation and the two objects of a prompt such as "a giraffe next to a lamp"; 'person' for people."""
    relation = next(words for words in PLACES if words in prompt)
    names = [half.split()[-1] for half in prompt.split(f" {relation} ")]
    return relation, ["person" if name in PEOPLE else name for name in names]


def spatial(prompt: str, objects: Sequence[DetectedObject]) -> float:
    """Score in [0, 1]: how sure the detector is of both objects, and how right their places; below 0.5 it is 0.

    Args:
        objects: detected objects, the surest first.
    """
    relation, names = named(prompt)
    first, second = (next((item for item in objects if item.label == name), None) for name in names)
    score = sum(0.25 * item.score for item in (first, second) if item is not None)
    if first is not None and second is not None:
        score += placed(relation, first.box, second.box) / 2
    return score if score >= 0.5 else 0.0


def placed(
    relation: str, first: Sequence[float], second: Sequence[float], least: float = 0.1, near: float = 150
) -> float:
    """Score in [0, 1] of a relation between the places of two boxes.

    Args:
        least: overlap (IoU) above which a side ("on the left of") counts less.
        near: distance in pixels up to which objects are next to each other.
    """
    (left, top, right, bottom), (left2, top2, right2, bottom2) = first, second
    dx, dy = (left2 + right2 - left - right) / 2, (top2 + bottom2 - top - bottom) / 2
    if relation in ("next to", "on side of", "near"):
        return 1.0 if min(abs(dx), abs(dy)) < near else near / max(abs(dx), abs(dy))
    along, across = {
        "on the right of": (-dx, dy),
        "on the left of": (dx, dy),
        "on the bottom of": (-dy, dx),
        "on the top of": (dy, dx),
    }.get(relation, (0.0, 0.0))
    if along <= abs(across):
        return 0.0
    both = max(0.0, min(right, right2) - max(left, left2)) * max(0.0, min(bottom, bottom2) - max(top, top2))
    overlap = both / ((right - left) * (bottom - top) + (right2 - left2) * (bottom2 - top2) - both)
    return 1.0 if overlap < least else least / overlap


def owl(name: str, device: str, threshold: float = 0.1) -> Callable[[Image, Sequence[str]], list[DetectedObject]]:
    """A detector of transformers for objects that are named in words; it returns them the surest first."""
    from transformers import AutoProcessor, Owlv2ForObjectDetection

    network: Any = (
        Owlv2ForObjectDetection.from_pretrained(**hub(name)).to(pick_device(device)).eval().requires_grad_(False)
    )
    processor = AutoProcessor.from_pretrained(**hub(name))

    @torch.no_grad()
    def detect(image: Image, names: Sequence[str]) -> list[DetectedObject]:
        texts = [[f"a photo of a {name}" for name in names]]
        inputs = processor(text=texts, images=image.convert("RGB"), return_tensors="pt").to(network.device)
        (seen,) = processor.post_process_grounded_object_detection(
            network(**inputs), threshold=threshold, target_sizes=[(image.height, image.width)]
        )
        columns = (seen[key].tolist() for key in ("labels", "scores", "boxes"))
        objects = [DetectedObject(names[label], score, tuple(box)) for label, score, box in zip(*columns, strict=True)]
        return sorted(objects, key=lambda item: -item.score)

    return detect


def blip_vqa(name: str, device: str, side: int = 480) -> Callable[[Image, str], float]:
    """P(yes) / (P(yes) + P(no)) as the first word of BLIP's answer to a question about a picture.

    Args:
        side: pixels; the authors' is 480. transformers' weights have positions for 384, which are interpolated.
    """
    from transformers import AutoTokenizer, BlipForQuestionAnswering

    target = pick_device(device)
    network: Any = BlipForQuestionAnswering.from_pretrained(**hub(name)).to(target).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(**hub(name))
    preprocess = Preprocess((side, side), fit="squash")

    @torch.no_grad()
    def ask(image: Image, question: str) -> float:
        seen = network.vision_model(preprocess.images([image]).to(target), interpolate_pos_encoding=True)[0]
        plain = re.sub(r"[.!\"()*#:;~]", "", question.lower())
        tokens = tokenizer(plain, truncation=True, max_length=35, return_tensors="pt").to(target)
        tokens.input_ids[:, 0] = ENCODE
        read = network.text_encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=seen, return_dict=True
        )
        answered = network.text_decoder(
            torch.tensor([[DECODE]], device=target),
            encoder_hidden_states=read.last_hidden_state,
            encoder_attention_mask=tokens.attention_mask,
            return_dict=True,
        )
        return float(answered.logits[0, 0, [YES, NO]].softmax(dim=-1)[0])

    return ask
