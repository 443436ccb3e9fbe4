"""Our recipes beside what the authors of their methods ran (configs/published.yaml), as Markdown tables.

A recipe that differs says why in the comment that opens it, under `Not as published`, a line a reason:
`#   training.group_size: why`, several settings with commas between them; what it `extends` speaks for it too.

    python scripts/compare_recipes.py sd3/dance_grpo   # one recipe, or several
    python scripts/compare_recipes.py --write          # all, into docs/recipes.md and a page of each family
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowalign import registry
from flowalign.config import BaseConfig, Config, load, recipe
from flowalign.planning.random_models import tiny_name
from flowalign.planning.tiny_pipelines import PIPELINES
from flowalign.runs.files import write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
START = "<!-- from here on written by scripts/compare_recipes.py --write -->\n"
COLUMNS = ("setting", "theirs", "where", "ours", "why different")


@dataclasses.dataclass
class Row:
    """A setting, as published and as it is here."""

    setting: str
    theirs: Any
    where: str
    ours: Any
    why: str | None
    """what the recipe says of the difference"""

    @property
    def equal(self) -> bool:
        both = [sorted(v) if self.setting == "model.lora.targets" else v for v in (self.theirs, self.ours)]
        return bool(both[0] == both[1])


def published() -> dict[str, Any]:
    """The table: `recipes` by name, the `code` they were read in, and the recipes `without` any."""
    table: dict[str, Any] = yaml.safe_load(recipe("published").read_text())
    return table


def reasons(path: Path) -> dict[str, str]:
    """Settings in which a recipe differs from the published one, and why, by itself and by what it extends."""
    text = path.read_text()
    above = re.search(r"^extends: (\S+)", text, re.MULTILINE)
    found = reasons(path.parent / above[1]) if above else {}
    return found | own_reasons(path)


def own_reasons(path: Path) -> dict[str, str]:
    """What the recipe's own first lines say."""
    found: dict[str, str] = {}
    for settings, why in re.findall(r"^#   ([\w., ]+): (.+)$", path.read_text(), re.MULTILINE):
        found |= dict.fromkeys(settings.split(", "), why)
    return found


def settings_of(config: BaseConfig) -> dict[str, Any]:
    """Every setting of a recipe by its dotted name, those included that it leaves to their defaults."""
    algorithm = config.build_algorithm()
    own = algorithm.settings.model_dump(mode="json")
    for table in ("advantage", "loss"):
        if table in own:
            named = getattr(algorithm.settings, table)
            defaults = inspect.signature(registry.resolve(table + ("es" if table == "loss" else "s"), named.name))
            given = {k: p.default for k, p in defaults.parameters.items() if p.kind is p.KEYWORD_ONLY}
            own[table] = {"name": named.name} | given | named.settings
    values = config.model_dump(mode="json") | {"algorithm": {"name": config.algorithm.name} | own}
    if isinstance(config, Config):
        plan = config.build_plan()
        values["rollout"]["plan"] = {"name": config.rollout.plan.name} | dataclasses.asdict(plan)
    else:
        values["algorithm"]["aggregation"] = algorithm.aggregation
    values["rewards"] = {reward.name: reward.weight for reward in config.rewards}
    lora = values["model"]["lora"]
    if isinstance(config, Config) and lora is not None and lora["targets"] is None:
        lora["targets"] = _usual_targets(config.model.path)
    return _dotted(values)


def _usual_targets(path: str) -> list[str]:
    """Where a LoRA goes by default in a model of this name."""
    pipeline = PIPELINES[tiny_name(path)].pipeline
    families = (registry.resolve("models", name) for name in registry.names("models"))
    return list(next(family for family in families if pipeline in family.pipelines).lora_targets)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections stay as a whole, too: whether there is a LoRA at all is `model.lora`."""
    flat = {}
    for key, value in values.items():
        flat[prefix + key] = value
        if isinstance(value, dict):
            flat |= _dotted(value, f"{prefix}{key}.")
    return flat


def compare(name: str, theirs: Mapping[str, Sequence[Any]]) -> list[Row]:
    """A recipe's settings beside the published ones."""
    ours, why = settings_of(load(recipe(name))), reasons(recipe(name))
    return [Row(key, value, where, ours.get(key), why.get(key)) for key, (value, where) in theirs.items()]


def unexplained(name: str, rows: Sequence[Row]) -> list[str]:
    """Differences without a reason, and reasons without a difference."""
    differ = {row.setting for row in rows if not row.equal}
    silent = [f"{name}: {row.setting} is {row.ours}, theirs {row.theirs} ({row.where})" for row in rows]
    stale = [
        f"{name}: says why {key} differs, and it does not" for key in own_reasons(recipe(name)) if key not in differ
    ]
    return [line for line, row in zip(silent, rows, strict=True) if not row.equal and not row.why] + stale


def shown(value: Any) -> str:
    """A value in a cell of a table."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{shown(number)} {name}" for name, number in value.items())
    if isinstance(value, list):
        cells = [shown(v) for v in value]
        return ", ".join([*cells[:2], "...", cells[-1]] if len(cells) > 12 and cells[0] == "1" else cells)
    return str(value)


def table(name: str, entry: Mapping[str, Any], code: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The section of a recipe."""
    source = code[entry["code"]]
    lines = [f"## {name}\n", f"{entry['method']}, in [{entry['code']}]({source['url']}) at {source['revision']}.\n"]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        ours = "=" if row.equal else _setting(row)
        cells = (f"`{row.setting}`", shown(row.theirs), row.where, ours, "" if row.equal else row.why or "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def pages(known: Mapping[str, Any], compared: Mapping[str, Sequence[Row]]) -> dict[Path, str]:
    """The text of each family's page, and of the page that lists them."""
    families: dict[str, list[str]] = {}
    for name in compared:
        families.setdefault(name.partition("/")[0], []).append(name)
    texts, lines = {}, ["| folder | recipes, each with its settings that are as published |", "|---|---|"]
    for family, names in families.items():
        tables = (table(name, known["recipes"][name], known["code"], compared[name]) for name in names)
        head = f"# configs/{family}\n\nHow to read the tables: [recipes](../recipes.md).\n"
        texts[PAGE.with_suffix("") / f"{family}.md"] = "\n".join([head, *tables])
        links = [
            f"[{name.partition('/')[2]}](recipes/{family}.md#{name.replace('/', '')}) "
            f"{sum(row.equal for row in compared[name])} of {len(compared[name])}"
            for name in names
        ]
        lines.append(f"| [{family}](recipes/{family}.md) | {', '.join(links)} |")
    return texts | {PAGE: PAGE.read_text().partition(START)[0] + START + "\n" + "\n".join(lines) + "\n"}


def _setting(row: Row) -> str:
    if row.setting == "model.lora" and isinstance(row.ours, dict):
        return f"rank {row.ours['rank']}"
    return shown(row.ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="FOLDER/NAME", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the tables of all recipes into docs/recipes")
    given = parser.parse_args()
    known = published()
    names = sorted(known["recipes"]) if given.write or not given.recipes else given.recipes
    compared = {name: compare(name, known["recipes"][name]["settings"]) for name in names}
    if given.write:
        for page, text in pages(known, compared).items():
            write_atomically(page, text)
    else:
        print("\n".join(table(name, known["recipes"][name], known["code"], rows) for name, rows in compared.items()))
    faults = [fault for name, rows in compared.items() for fault in unexplained(name, rows)]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
