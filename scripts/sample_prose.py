"""`python -m scripts.sample_prose --seed N`: read some of the code's English, chosen at random.

Ten docstrings, comments, test names and error texts each, with file and line. They shall read like
the right-hand column of a style guide; mend the kind of fault that shows, and not the place.
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap

from scripts.prose import KINDS, sources, texts

EACH = 10


def main() -> int:
    """Print the sample."""
    parser = argparse.ArgumentParser(description="a random sample of the code's English")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=EACH, help="how many of each kind")
    given = parser.parse_args()
    dice = random.Random(given.seed)
    found = [text for path in sources() for text in texts(path)]
    for kind in KINDS:
        mine = [text for text in found if text.kind == kind]
        print(f"\n{kind}, {min(given.each, len(mine))} of {len(mine):,}\n")
        for text in dice.sample(mine, min(given.each, len(mine))):
            print(f"{text.path}:{text.line}")
            print(textwrap.indent(textwrap.dedent(text.text).strip(), "    "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
