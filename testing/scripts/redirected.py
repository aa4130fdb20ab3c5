"""Start a script in a rank of a job, with its stdout and stderr in files of their own.

python redirected.py FOLDER PAUSE_S SCRIPT [arguments]

FOLDER gets `SLOT-ATTEMPT.stdout` and `SLOT-ATTEMPT.stderr`. Each operation of the script begins
PAUSE_S seconds later, so that a fault of a test meets a short script.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.environment import RankSettings
from paceline.train.script.launch import main
from paceline.worker.script_engine import ScriptEngine


def pause(seconds: float) -> None:
    """Make each operation of the script wait before it begins, unless the rank follows others."""
    operate = ScriptEngine.operate

    def slowly(engine: ScriptEngine, *given: Any, **named: Any) -> Any:
        if not engine.operations.path.follows:
            time.sleep(seconds)
        return operate(engine, *given, **named)

    setattr(ScriptEngine, "operate", slowly)  # noqa: B010


def redirect(folder: Path) -> None:
    """Let stdout and stderr of this process go to files that are named after the rank."""
    settings = RankSettings.from_environment(os.environ)
    assert settings is not None, "redirected.py runs in a rank of a job"
    member = settings.member
    for fd, kind in ((1, "stdout"), (2, "stderr")):
        path = folder / f"{member.slot}-{member.attempt}.{kind}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)


if __name__ == "__main__":
    redirect(Path(sys.argv[1]))
    if (pause_s := float(sys.argv[2])) > 0:
        pause(pause_s)
    sys.exit(main(sys.argv[3:]))
