"""The authors' words of a template's questions, read from their own file, which is not run."""

from dataclasses import replace
from pathlib import Path

from rewards.judges.template import Template
from rewards.wording import named_texts

OPENED = {"request": "prompt", "text_prompt": "prompt"}
"""Authors' names for the prompt in their texts."""


def with_wording(template: Template, file: Path) -> Template:
    """A template that asks in the words of the authors' Python file.

    Raises:
        ValueError: the file is not the one that the template was made for; one line.
    """
    texts = named_texts(file)
    questions = []
    for question in template.questions:
        if missing := [name for name in question.official if name not in texts]:
            raise ValueError(f"template '{template.name}': {file} has no text '{missing[0]}'")
        if question.official:
            text = "\n".join(texts[name] for name in question.official)
        else:
            text = max((text for text in texts.values() if "{prompt}" in text), key=len, default="")
        for old, new in question.reworded.items():
            text = text.replace(old, new)
        for old, new in OPENED.items():
            text = text.replace(f"{{{old}}}", f"{{{new}}}")
        if not text:
            raise ValueError(f"template '{template.name}': {file} has no text about a prompt")
        questions.append(replace(question, ask=text.removeprefix("<image>"), system=""))
    reworded = replace(template, questions=questions)
    reworded.check()
    return reworded
