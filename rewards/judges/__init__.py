"""Vision-language models as judges: one interface, two backends, questions as data files."""

from rewards.judges.base import Judge, Question
from rewards.judges.local import Local, LocalJudge
from rewards.judges.own import OwnJudge, OwnModel
from rewards.judges.reward import JudgeReward, PairwiseJudgeReward
from rewards.judges.served import Served, ServedJudge
from rewards.judges.template import Template, Unparsed, load_template

__all__ = [
    "Judge",
    "Local",
    "LocalJudge",
    "OwnModel",
    "OwnJudge",
    "PairwiseJudgeReward",
    "Question",
    "Served",
    "ServedJudge",
    "Template",
    "Unparsed",
    "JudgeReward",
    "load_template",
]
