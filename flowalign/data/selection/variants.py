"""Prompts of the list in other words or with other metadata, which a selection adds behind the list's own."""

import json
from typing import Any

from flowalign.data import Prompts


class Variants:
    """Prompts that stand behind the list's own, each once; after a checkpoint they have the same numbers."""

    def __init__(self) -> None:
        self.listed: int | None = None
        """Prompts of the list itself."""
        self.added: list[tuple[int, str, dict[str, Any]]] = []
        """Source, text and changed metadata of each."""
        self._place: dict[str, int] = {}
        """Place of each among them."""

    def number(self, prompts: Prompts, source: int, text: str, changed: dict[str, Any]) -> int:
        """Number of a variant of the prompt `source`, which is added where it is new."""
        listed = self.join(prompts)
        key = json.dumps([source, text, changed])
        if key not in self._place:
            self._place[key] = len(self.added)
            self.added.append((source, text, changed))
            self.join(prompts)
        return listed + self._place[key]

    def source(self, number: int) -> int:
        """Number of the prompt of the list that this one is, or is a variant of."""
        if self.listed is None or number < self.listed:
            return number
        return self.added[number - self.listed][0]

    def join(self, prompts: Prompts) -> int:
        """Put all variants behind the list's own prompts, as after a checkpoint; return the number of these."""
        self.listed = len(prompts) if self.listed is None else self.listed
        for source, text, changed in self.added[len(prompts) - self.listed :]:
            prompts.texts.append(text)
            prompts.metadata.append(prompts.metadata[source] | changed)
        return self.listed

    def state_dict(self) -> dict[str, Any]:
        return {"listed": self.listed, "added": [list(variant) for variant in self.added]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.listed = state["listed"]
        self.added = [(source, text, dict(changed)) for source, text, changed in state["added"]]
        self._place = {json.dumps(list(variant)): place for place, variant in enumerate(self.added)}
