"""Start a script in a rank of a job, with its stdout and stderr in files of their own.

python redirected.py FOLDER SCRIPT [arguments]
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.train.script.launch import main
from paceline.worker.script_engine import ScriptEngine

MEMBER = "PACELINE_MEMBER"


PAUSE = "SCRIPT_PAUSE_MS"
"""Variable with a pause before each operation, so that a fault meets a short script."""


def pause(ms: float) -> None:
    """Make each operation of the script wait before it begins."""
    operate = ScriptEngine.operate

    def slowly(engine: ScriptEngine, *given: Any, **named: Any) -> Any:
        if not engine.operations.path.follows:
            time.sleep(ms / 1000)
        return operate(engine, *given, **named)

    setattr(ScriptEngine, "operate", slowly)  # noqa: B010


def redirect(folder: Path) -> None:
    """Let stdout and stderr of this process go to files that are named after the rank."""
    slot, _, attempt = os.environ[MEMBER].replace("#", ".").partition(".")
    name = f"{slot}-{attempt.rpartition('.')[2]}"
    for fd, kind in ((1, "stdout"), (2, "stderr")):
        sys.stdout.flush()
        os.dup2(os.open(folder / f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)


if __name__ == "__main__":
    redirect(Path(sys.argv[1]))
    if PAUSE in os.environ:
        pause(float(os.environ[PAUSE]))
    sys.exit(main(sys.argv[2:]))
