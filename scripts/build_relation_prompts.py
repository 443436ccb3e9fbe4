"""Write the prompts of the relations world: prompts of the shapes world that place things of two colours.

python scripts/build_relation_prompts.py
"""

import json
from pathlib import Path

from rewards.relations import is_of_two_colours
from rewards.shapes import heldout_requests, train_requests

PROMPTS = Path(__file__).parent.parent / "flowalign" / "data" / "assets" / "prompts"


def main() -> None:
    for name, requests in {"train": train_requests(), "heldout": heldout_requests()}.items():
        lines = [
            json.dumps({"prompt": request.prompt, "category": request.relation}) + "\n"
            for request in requests
            if is_of_two_colours(request)
        ]
        (PROMPTS / f"relations_{name}.jsonl").write_text("".join(lines))
        print(f"relations_{name}: {len(lines)}")


if __name__ == "__main__":
    main()
