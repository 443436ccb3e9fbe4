"""The scoring rules of the suites, against what the authors' own functions said of the same numbers.

geneval_official.jsonl: random detections for prompts of the official list (asked for red and orange alone), and whether
`evaluate` of evaluation/evaluate_images.py at github.com/djghosh13/geneval, af4902f, finds the picture right, with
`color_classification` replaced by `stand_in` below.
official.json: random numbers, and what these made of them: `compute_dpg_one_sample` of TencentQQGYLab/ELLA 3c228f1 with
a judge that says what is recorded; `determine_position` of Karine-Huang/T2I-CompBench 1b70949; `subject_consistency`,
`cal_score`, and `get_score` with `check_move` (frames of 64 x 96 pixels that move everywhere at the recorded speeds)
of Vchitect/VBench 45e79ec.
"""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import gmean
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForQuestionAnswering,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SwinConfig,
)

from flowalign import registry
from flowalign.errors import ConfigError
from flowalign.evaluation.benchmarks import dpg, geneval, geneval2, published, t2i_compbench, unigenbench, vbench
from flowalign.evaluation.benchmarks.dreambench import DreamBench
from flowalign.evaluation.benchmarks.judged import says_yes
from flowalign.evaluation.benchmarks.preference import DrawBench
from rewards.detection import DetectedObject, Detection, cut_out, geneval_name, requirements
from rewards.judges.base import Question
from rewards.judges.local import Local
from rewards.segmentation import instances
from rewards.shapes.clip import TINY_CLIP
from rewards.vision import Preprocess

HERE = Path(__file__).parent
OFFICIAL = json.loads((HERE / "official.json").read_text())
DETAILED = {"return_dict_in_generate": True}
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def test_geneval_prompts_are_the_official_ones():
    """SHA-256 of prompts/evaluation_metadata.jsonl of djghosh13/geneval, each line with sorted keys."""
    records = geneval.published()
    assert len(records) == 553
    text = "\n".join(json.dumps(record, sort_keys=True) for record in records)
    digest = "94bc1c23d27e1ac4aa6d9415ac49a6e72263694e5149eb1d895cf61f9da1c083"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def stand_in(item: DetectedObject) -> str:
    """A colour that follows from the box, in the place of CLIP's."""
    return ("red", "orange")[int(sum(item.box)) % 2]


def test_geneval_agrees_with_the_official_rules_on_the_same_detections():
    cases = [json.loads(line) for line in (HERE / "geneval_official.jsonl").read_text().splitlines()]
    wrong = []
    for case in cases:
        least = 0.9 if case["metadata"]["tag"] == "counting" else 0.3
        found = [DetectedObject(geneval_name(name), score, tuple(box)) for name, box, score in case["objects"]]
        sure = sorted((item for item in found if item.score > least), key=lambda item: -item.score)
        if all(requirements(case["metadata"], sure, stand_in)) != case["correct"]:
            wrong.append(case)
    assert len(cases) == 400 and 100 < sum(case["correct"] for case in cases) < 200
    assert wrong == []


def test_geneval_scores_a_task_under_its_name(monkeypatch):
    suite = geneval.GenEval()
    monkeypatch.setitem(suite.__dict__, "_reward", Seen())
    prompts = suite.prompts()
    rows = [i for i, record in enumerate(prompts.metadata) if record["tag"] in ("single_object", "counting")][78:82]
    metadata = [prompts.metadata[i] for i in rows]
    scores = suite.score([NOISE] * 4, [prompts.texts[i] for i in rows], metadata)
    assert [*map(dict, scores)] == [{"single_object": 1.0}] * 2 + [{"counting": 0.0}] * 2


class Seen(Detection):
    """Sees one of everything that is asked for."""

    def __init__(self) -> None:
        self.threshold, self.counting_threshold, self.strict_weight, self.batch_size = 0.3, 0.9, 1.0, 16
        self.graded = False

    def _check_known(self, wanted: str, prompt: str) -> None:
        pass

    def detect(self, images):
        kinds = ("person", *geneval.CLASSES)
        return [[DetectedObject(name, 0.95, (0, 0, 9, 9)) for name in dict.fromkeys(kinds)] for _ in images]


def test_instances_are_read_as_the_official_detector_reads_them():
    """Pairs of a query and a class, the mask cut from the padded input, its probability in the score, its box."""
    classes = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 1.0]])
    masks = torch.full((2, 4, 4), -8.0)
    masks[0, :2, :2], masks[1, 2, 3] = 8.0, 8.0
    labels, scores, boxes, found = instances(classes, masks, (8, 8), (8, 8), (16, 16))
    assert labels.tolist() == [0, 1]
    upsampled = torch.nn.functional.interpolate(masks[None], (8, 8), mode="bilinear")
    upsampled = torch.nn.functional.interpolate(upsampled, (16, 16), mode="bilinear")[0]
    for i, (query, label) in enumerate([(0, 0), (1, 1)]):
        inside = [value for value in upsampled[query].sigmoid().flatten().tolist() if value > 0.5]
        expected = classes[query].softmax(0)[label].item() * np.mean(inside)
        assert scores[i].item() == pytest.approx(expected, rel=1e-4)
    for mask, box in zip(found, boxes.int().tolist(), strict=True):
        left, top, right, bottom = box
        assert mask[top:bottom, left:right].any(0).all() and mask.sum() == mask[top:bottom, left:right].sum()
    assert boxes[0].tolist() == [0, 0, 8, 8]
    # padding on the right and below is not part of the picture
    inner = instances(classes, masks, (8, 8), (4, 4), (16, 16))[2]
    assert inner[0].tolist() == [0, 0, 16, 16] and inner[1].tolist() == [0, 0, 0, 0]


def test_a_mask2former_finds_objects_with_masks(tmp_path):
    torch.manual_seed(0)
    swin = SwinConfig(image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2)
    swin._out_features = ["stage1", "stage2", "stage3", "stage4"]
    swin._out_indices = [1, 2, 3, 4]
    size = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32}
    size |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    config = Mask2FormerConfig(backbone_config=swin, num_queries=5, **size)
    config.id2label, config.label2id = {0: "cat", 1: "tv"}, {"cat": 0, "tv": 1}
    Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(tmp_path)
    detector = Detection(str(tmp_path), threshold=0.0, counting_threshold=0.0, device="cpu")
    wide = NOISE.resize((48, 32))
    both = detector.detect([wide, NOISE])
    assert len(both[0]) == 5 and all(item.mask.shape == (32, 48) for item in both[0])
    # what else is in the batch does not matter
    (alone,) = detector.detect([NOISE])
    assert [item.label for item in alone] == [item.label for item in both[1]]
    assert [item.score for item in alone] == pytest.approx([item.score for item in both[1]], rel=1e-3)
    item = next(item for item in alone if item.mask.any() and not item.mask.all())
    shown = np.asarray(cut_out(NOISE, item))
    left, top, right, bottom = map(int, item.box)
    assert (shown[~item.mask[top:bottom, left:right]] == 0x99).all()


def test_dpg_bench_as_its_authors_grade():
    for case in OFFICIAL["dpg"]:
        graph = {"numbers": case["numbers"], "parents": case["parents"], "categories": ["entity"] * len(case["yes"])}
        scores = dpg.graded(case["yes"], graph)
        assert scores["dpg"] == pytest.approx(case["score"])
        # categories are of the answers as they were given
        assert scores["entity"] == [float(own) for own in case["yes"]]


def test_dpg_bench_reads_the_published_table(tmp_path):
    fields = ["item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language"]
    rows = [
        ["0", "passed over", "1", "0", "entity - whole (dog)", "Is there a dog?"],
        ["0", "a white dog", "1", "0", "entity - whole (dog)", "Is there a dog?"],
        ["0", "a white dog", "2", "1", "attribute - color (dog, white)", "Is the dog white?"],
        ["7", "a cat, left of a dog", "1", "0, 2", "relation - spatial (cat, dog)", "Is it left of it?"],
    ]
    with open(tmp_path / "dpg.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([fields, *rows])
    prompts = dpg.DPGBench(str(tmp_path / "dpg.csv")).prompts()
    assert prompts.texts == ["a white dog", "a cat, left of a dog"]
    assert prompts.metadata[0]["categories"] == ["entity", "attribute"]
    assert prompts.metadata[1]["parents"] == [[0, 2]]


def test_places_as_t2i_compbench_scores_them():
    made = [t2i_compbench.placed(case["place"], *case["boxes"]) for case in OFFICIAL["places"]]
    assert made == pytest.approx([case["score"] for case in OFFICIAL["places"]])
    cat, dog = DetectedObject("cat", 0.9, (0, 0, 10, 10)), DetectedObject("person", 0.7, (30, 0, 40, 10))
    assert t2i_compbench.spatial("a cat on the left of a boy", [cat, dog]) == pytest.approx(0.9)
    # sure of both, and in the wrong places
    assert t2i_compbench.spatial("a cat on the right of a boy", [cat, dog]) == 0.0
    assert t2i_compbench.spatial("a cat near a car", [cat]) == 0.0


def test_blip_is_asked_as_transformers_generates(tmp_path):
    """The first word's probabilities, of the authors' question tokens."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": 30524, "encoder_hidden_size": 16, "bos_token_id": 30522, "sep_token_id": 102}
    config = BlipConfig(text_config=text, vision_config=small | {"image_size": 32, "patch_size": 8})
    network = BlipForQuestionAnswering(config).eval()
    network.save_pretrained(tmp_path)
    words = [f"w{i}" for i in range(30522)]
    for i, word in {
        0: "[PAD]",
        100: "[UNK]",
        101: "[CLS]",
        102: "[SEP]",
        103: "[MASK]",
        7: "a",
        8: "bench",
        9: "?",
    }.items():
        words[i] = word
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    pixels = Preprocess((48, 48), fit="squash").images([NOISE])
    tokens = torch.tensor([[30523, 7, 8, 9, 102]])
    mask, options = torch.ones_like(tokens), {"interpolate_pos_encoding": True, "max_new_tokens": 1, **DETAILED}
    made = network.generate(tokens, pixels, mask, output_logits=True, **options)
    expected = made.logits[0][0, [2748, 2053]].softmax(-1)[0].item()
    sure = t2i_compbench.blip_vqa(str(tmp_path), "cpu", side=48)(NOISE, 'A "bench"?')
    assert sure == pytest.approx(expected, rel=1e-5) and sure != pytest.approx(0.5, abs=1e-4)


def test_videos_as_vbench_scores_them():
    for case in OFFICIAL["consistency"]:
        assert vbench.consistency(torch.tensor(case["seen"])) == pytest.approx(case["score"], abs=1e-6)
    for case in OFFICIAL["flicker"]:
        assert vbench.steadiness(np.array(case["frames"], dtype=np.uint8)) == pytest.approx(case["score"])
    for case in OFFICIAL["moves"]:
        speeds = iter(case["speeds"])
        frames = np.zeros((len(case["speeds"]) + 1, 64, 96, 3), dtype=np.uint8)
        flow = lambda first, second: torch.full((1, 2, 64, 96), next(speeds) / 2**0.5)  # noqa: B023, E731
        assert vbench.moves(flow, frames) == case["moves"]
    ramp = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), dtype=np.uint8)
    assert vbench.linear_smoothness(ramp) == 1.0
    assert vbench.linear_smoothness(ramp[[0, 2, 0]]) == pytest.approx(1 - 2 / 255)


def test_soft_tifa_is_the_mean_over_a_prompts_questions():
    sure, skills = [0.9, 0.5, 0.2], ["count", "object", "count"]
    scores = geneval2.soft_tifa(sure, skills)
    assert scores["soft_tifa_gm"] == pytest.approx(gmean(sure))
    assert scores["soft_tifa_am"] == pytest.approx(np.mean(sure))
    assert scores["count"] == [0.9, 0.2]
    assert geneval2.soft_tifa([0.0, 1.0], ["object"] * 2)["soft_tifa_gm"] == 0.0
    assert geneval2.answers("How many cows are in the image?", "three") == [
        "three",
        "Three",
        " three",
        " Three",
        "3",
        " 3",
    ]
    assert geneval2.answers("Are the cows plastic?", "Yes") == ["Yes", "yes", " yes", " Yes"]


def test_judges_are_asked_for_their_first_token():
    judge = Local("flowalign/data/assets/tiny_vlm", device="cpu", batch_size=2).build("test")
    questions = [Question((NOISE,), text) for text in ("two red circles?", "one blue square?", "a cat?")]
    sure = judge.begins(questions, [["yes", " yes"], ["no"], ["yes", "yes"]])
    for question, own, answers in zip(questions, sure, (["yes", " yes"], ["no"], ["yes", "yes"]), strict=True):
        inputs = judge._inputs([question])
        probability = judge.model(**inputs).logits[0, -1].float().softmax(-1)
        first = [judge.tokenizer.encode(answer, add_special_tokens=False)[0] for answer in answers]
        assert own == pytest.approx(float(sum(probability[token] for token in first)), rel=1e-4)
    assert says_yes(judge, [(NOISE, "two red circles?")]) in ([True], [False])


def test_unigenbench_asks_in_the_authors_words_and_reads_their_format(tmp_path):
    """The wording is read from a file like theirs, of which nothing runs."""
    (tmp_path / "eval_common.py").write_text(
        'raise SystemExit("never run")\n'
        'SYSTEM_PROMPT_EN_TEMPLATE = "{prompt} / {testpoint} / {explanation} / {test_explanation}"\n'
        'EXPLANATION_DICT_EN = {"Style": "art", "Attribute - Color": "hues"}\n'
    )
    texts = unigenbench.constants(tmp_path / "eval_common.py")
    asked = unigenbench.question(texts, "a red car", ["Style", "Attribute - Color"], ["oil", "red"])
    asked, points_here = asked.split(" / Checkpoints Description:")
    assert points_here == "「\nStyle: oil\nAttribute - Color: red\n」"
    meanings = "「\nStyle: art\nAttribute - Color: hues\n」"
    assert asked == f"a red car / ['Style', 'Attribute - Color'] / Checkpoints Defination:{meanings}"
    points = ["Style", "Attribute - Color", "Attribute - Size"]
    scores = unigenbench.graded("<analysis>['', '', '']</analysis> <score>[1, 0, 1]</score>", points)
    assert scores["Attribute"] == [0.0, 1.0] and scores["Style"] == [1.0] and scores["Attribute - Size"] == [1.0]
    for reply in ("no score", "<score>[1]</score>", "<score>[1, 0,</score>"):
        assert unigenbench.graded(reply, points) == {"unparsed": 1.0}
    with pytest.raises(ConfigError, match="needs a judge"):
        unigenbench.UniGenBench()


def test_dreambench_reads_the_published_list(tmp_path):
    (tmp_path / "prompts_and_classes.txt").write_text(
        "Classes\n\nsubject_name,class\nvase,vase\ndog2,dog\nbear_plushie,stuffed animal\n\nPrompts\n\n"
        "Object Prompts\n\n"
        "prompt_list = [\n'a {0} {1} in the snow'.format(unique_token, class_token),\n"
        "'a cube shaped {0} {1}'.format(unique_token, class_token)\n]\n\nLive Subject Prompts\n\nprompt_list = [\n"
        "'a {0} {1} wearing a red hat'.format(unique_token, class_token)\n]\n"
    )
    for subject in ("vase", "dog2", "bear_plushie"):
        (tmp_path / subject).mkdir()
        NOISE.save(tmp_path / subject / "00.jpg")
    toy = DreamBench(str(tmp_path), "bear_plushie").prompts()
    assert toy.texts == ["a sks stuffed animal in the snow", "a cube shaped sks stuffed animal"]
    assert toy.metadata[1] == {"plain": "a cube shaped stuffed animal"}
    dog = DreamBench(str(tmp_path), "dog2", token="").prompts()
    assert dog.texts == ["a dog wearing a red hat"] and dog.metadata[0]["image"] == [str(tmp_path / "dog2" / "00.jpg")]
    with pytest.raises(ConfigError, match="did you mean 'vase'"):
        DreamBench(str(tmp_path), "vasse").prompts()
    with Image.open(tmp_path / "vase" / "00.jpg") as photograph:
        vase = DreamBench(str(tmp_path), "vase", clip=str(TINY_CLIP), device="cpu")
        (scores,) = vase.score([photograph.convert("RGB")], ["a sks vase"], [{"plain": "a vase"}])
    assert scores["clip_i"] == pytest.approx(1.0, abs=1e-5) and abs(scores["clip_t"]) < 1


def test_preferences_are_means_of_rewards(tmp_path):
    (tmp_path / "own.txt").write_text("one red circle\n")
    suite = DrawBench(str(tmp_path / "own.txt"), "prompt", ["tiny_clip", "jpeg_size"])
    (scores,) = suite.score([NOISE], suite.prompts().texts, [{}])
    assert list(scores) == ["tiny_clip", "jpeg_size"] and suite.headline == ("tiny_clip",)
    with pytest.raises(ConfigError, match="pick_score"):
        DrawBench(rewards=["pick_scor"])


def test_what_is_not_shipped_is_named_with_its_licence(tmp_path, monkeypatch):
    monkeypatch.setattr(published.constants, "HF_HOME", str(tmp_path))
    for name, suite in {"geneval2": geneval2.GenEval2(), "dpg": dpg.DPGBench(), "vbench": vbench.VBench()}.items():
        with pytest.raises(ConfigError, match=f"licence: .* is offline; --set {name}[.]"):
            suite.prompts()
    content, file = b"one prompt\n", tmp_path / "served" / "list.txt"
    file.parent.mkdir()
    file.write_bytes(content)
    monkeypatch.setattr(published.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(published.Published, "address", file.as_uri())
    right = published.Published("a/b", "c", "list.txt", "MIT", hashlib.sha256(content).hexdigest())
    assert published.lines(published.located(right, None, "x.prompts")) == ["one prompt"]
    file.unlink()
    assert published.located(right, None, "x.prompts").read_bytes() == content
    file.write_bytes(b"another")
    with pytest.raises(ConfigError, match="not what was published"):
        published.located(published.Published("a/b", "d", "list.txt", "MIT", right.sha256), None, "x.prompts")


def test_every_suite_says_what_it_is():
    assert {"shapes", "relations", "spelling", "geneval", "ocr", "geneval2", "dpg", "vbench"} <= registry.names(
        "suites"
    ).keys()
    for name in registry.names("suites"):
        suite = registry.resolve("suites", name)
        assert suite.name == name and suite.version >= 1
        assert registry.summary("suites", name)
