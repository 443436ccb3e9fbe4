"""Shipped templates read the published formats, and refuse what is no verdict."""

import pytest

from rewards.base import Region
from rewards.check import REPLIES
from rewards.judges.regions import regions_in
from rewards.judges.template import SHIPPED, combined, load_template
from rewards.judges.wording import with_wording

NAMES = sorted(path.stem for path in SHIPPED.glob("*.yaml"))

SCORES = {
    "unified_reward_point": ("cat (object): 1\nred (attribute): 0\nFinal Score: 3.5", {"final": 0.625}),
    "unified_reward_axes": (
        "Alignment Score (1-5): 5\nCoherence Score (1-5): 3\nStyle Score (1-5): 1.0",
        {"alignment": 1.0, "coherence": 0.5, "style": 0.0},
    ),
    "edit_score": ('```json\n{"reasoning": "fine", "score": [20, 5]}\n```', {"editing": 0.8, "consistency": 0.2}),
    "video_reward": (
        "Visual Quality: 8\nMotion Quality: 5.0\nText Alignment: 10",
        {"visual_quality": 0.8, "motion_quality": 0.5, "text_alignment": 1.0},
    ),
    "srum_global": ("Score: -0.5\nReason: left and right are swapped", {"layout": 0.25}),
    "srum_local": (
        "Identified Object: a dog\nScore: 1.0\n\nIdentified Object: a tree\nScore: -1.0\n",
        {"objects": 0.5},
    ),
    "srum_regions": (
        "Identified Object: a dog\nBox: 100, 200, 500, 900\nScore: 1.0\n\n"
        "Identified Object: a tree\nBox: [0, 0, 90, 90]\nScore: -0.5\n",
        {"objects": 0.625},
    ),
}

WINNERS = {
    "unified_reward_pair": {
        1.0: "It is sharper. Image 1 is better than Image 2.",
        0.0: "Image 2 is better than Image 1.",
        0.5: "Both images are equally good.",
    },
    "unified_reward_think": {
        1.0: "<think>Image 2 is better at colour</think>\n<answer>Image 1 is better</answer>",
        0.0: "<think>...</think><answer> Image 2 is better </answer>",
    },
    "unified_reward_flex": {
        1.0: '{"categories": [{"cat_winner": "Image 2"}], "reason": "", "winner": "Image 1"}',
        0.0: '```json\n{"categories": [{"cat_winner": "Image 1"}], "winner": "Image 2"}\n```',
    },
}


def test_regions_are_the_boxes_and_scores_of_a_reply():
    reply = SCORES["srum_regions"][0] + "Box: 700, 0, 600, 100\nScore: 1\nBox: 0, 0, 10, 10\nScore: 7\n"
    assert regions_in(f"<think>Box: 1, 1, 2, 2\nScore: 1</think>{reply}") == [
        Region([0.1, 0.2, 0.5, 0.9], 1.0),
        Region([0.0, 0.0, 0.09, 0.09], -0.5),
    ]


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_read(name):
    reply, parts = SCORES[name]
    assert load_template(name).questions[0].read_scores(reply) == pytest.approx(parts)


@pytest.mark.parametrize("name", WINNERS)
def test_winners_are_read(name):
    question = load_template(name).questions[0]
    assert {value: question.read_winner(reply) for value, reply in WINNERS[name].items()} == {
        value: value for value in WINNERS[name]
    }


def test_artifacts_are_bad():
    kinds = ("Human anatomy", "Animal anatomy", "Object structure", "Attributes", "Interaction", "Scene")
    question = load_template("magic_mirror").questions[0]
    parts = question.read_scores("\n".join(f"{kind}: {3 if kind == 'Scene' else 0}" for kind in kinds))
    assert parts == {kind.lower().replace(" ", "_"): 0.0 if kind == "Scene" else 1.0 for kind in kinds}


@pytest.mark.parametrize("name", NAMES)
def test_hostile_replies_are_no_verdict(name):
    template = load_template(name)
    for question in template.questions:
        for reply in REPLIES:
            if template.answer == "score":
                assert question.read_scores(reply) is None, reply
            if template.answer == "winner":
                assert question.read_winner(reply) is None, reply


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_filled_in(name):
    template = load_template(name)
    assert template.source
    for question in template.questions:
        text = template.text(question, "{criterion} of a \\1 cat", {"criterion": "beauty"})
        assert "{prompt}" not in text
        assert ("{criterion} of a \\1 cat" in text) == ("{prompt}" in question.ask)  # once, and literally
        assert ("beauty" in text) == ("{criterion}" in question.ask)


def test_two_questions_of_edit_score_combine_as_published():
    # (min(SC) * min(PQ)) ** 0.5, arXiv 2509.23909
    template = load_template("edit_score")
    replies = ['{"reasoning": "", "score": [20, 5]}', '{"reasoning": "", "score": [25, 10]}']
    values = [
        combined(list(question.read_scores(reply).values()), question.combine)
        for question, reply in zip(template.questions, replies)
    ]
    assert combined(values, template.combine) == pytest.approx((5 / 25 * 10 / 25) ** 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: x\nanswer: score\nquestions: [{name: a, ask: 'Hm?'}]", "needs `scores`"),
        ("source: x\nanswer: echo\nquestions: [{name: a, ask: 'Of {who}?'}]", "{who} is neither"),
        ("source: x\nanswer: winner\nquestions: [{name: a, ask: 'Hm?', winner: {first: a}}]", "needs `winner`"),
        ("source: x\nanswer: echo\nquestions: [{name: a, ask: 'Hm?', pictures: [third]}]", "not 'third'"),
        ("source: x\nanswer: echo\nquestion: []", "questions"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_template(str(path))


def test_unknown_names_get_the_list():
    with pytest.raises(ValueError, match="no template 'nothing'.*edit_score.*vqa_score"):
        load_template("nothing")


def test_scores_for_both_sides_are_added_up():
    reply = "# Detailed Judgement\n1. x\n## Score A: {}\n## Score B: **{}**\n2. y\n## Score A: {}\n## Score B: {}\n"
    question = load_template("rational_rewards").questions[0]
    given = ((4, 1, 2, 3.5), (1, 2, 3, 2), (1, 2, 2, 2))
    assert [question.read_winner(reply.format(*scores)) for scores in given] == [1.0, 0.5, 0.0]
    # what is asked of neither counts for neither; a score for one side alone is no verdict
    assert question.read_winner(reply.format(4, 3, "N/A", "N/A")) == 1.0
    assert question.read_winner(reply.format(4, 3, 2, "N/A")) is None
    shared = load_template("unified_reward_2_pair").questions[0]
    axes = "Alignment Score:\n Image 1: 0.6\n Image 2: 0.4\n\nStyle Score:\n Image 1: 0.3\n Image 2: 0.7"
    assert shared.read_winner(axes) == 0.0


def test_the_authors_words_take_the_place_of_ours(tmp_path):
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        "import nothing\n"
        '_context_no_delimit_reasoning_first = "You judge."\n'
        '_prompts_0shot_two_image_edit_rule = """Two."""\n'
        '_prompts_0shot_tie_rule_SC = "From 0 to 10: <instruction>"\n'
        '_prompts_0shot_rule_PQ = "10 is best."\n'
        'GEN_PROMPT_TEMPLATE = """Ask {request} <image>"""\n'
    )
    semantics, quality = with_wording(load_template("edit_score"), theirs).questions
    assert semantics.ask == "You judge.\nTwo.\nFrom 0 to 25: {prompt}" and quality.ask == "You judge.\n25 is best."
    assert with_wording(load_template("rational_rewards"), theirs).questions[0].ask == "Ask {prompt} "
    longest = tmp_path / "script.py"
    longest.write_text(
        "prompt = ''\n"
        "ask({'text': 'Which is better?\\n' f'Caption: [{prompt}]'})\n"
        "other = 'no caption, but longer than that is'\n"
    )
    made = with_wording(load_template("unified_reward_pair"), longest)
    assert made.text(made.questions[0], "a {cat}", {}) == "Which is better?\nCaption: [a {cat}]"
    with pytest.raises(ValueError, match="template 'edit_score': .*script.py has no text '_context"):
        with_wording(load_template("edit_score"), longest)
    with pytest.raises(ValueError, match="no text about a prompt"):
        with_wording(load_template("unified_reward_pair"), tmp_path / "theirs.py")
