"""Start a script in a rank of a job, with its stdout and stderr in files of their own.

python redirected.py FOLDER SCRIPT [arguments]
"""

import os
import sys
from pathlib import Path

from paceline.train.script.launch import main

MEMBER = "PACELINE_MEMBER"


def redirect(folder: Path) -> None:
    """Let stdout and stderr of this process go to files that are named after the rank."""
    slot, _, attempt = os.environ[MEMBER].replace("#", ".").partition(".")
    name = f"{slot}-{attempt.rpartition('.')[2]}"
    for fd, kind in ((1, "stdout"), (2, "stderr")):
        sys.stdout.flush()
        os.dup2(os.open(folder / f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)


if __name__ == "__main__":
    redirect(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
