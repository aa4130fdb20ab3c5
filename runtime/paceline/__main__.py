"""Runs the command line with the caller's Python interpreter: `python -m paceline`.

`python -m paceline train.py` is `paceline launch train.py`, as `python -m torch.distributed.run` is
torchrun.
"""

import sys

from paceline.cli.main import main

if sys.argv[1:2] == ["-m"] or "".join(sys.argv[1:2]).endswith(".py"):
    sys.argv.insert(1, "launch")
main()
