"""Start a script in a rank of a job, with its stdout and stderr in files of their own.

python redirected.py FOLDER PAUSE_S LATE_S SCRIPT [arguments]

FOLDER gets `SLOT-ATTEMPT.stdout` and `SLOT-ATTEMPT.stderr`. Each operation of the script begins
PAUSE_S seconds later, so that a fault of a test meets a short script. One rank, which is drawn for
each operation, is LATE_S seconds later still. `SLOT-ATTEMPT.taken` gets a line with the number of
samples in each gradient that the script brings to the job.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from paceline.environment import RankSettings
from paceline.train.script.launch import main
from paceline.worker.script_engine import ScriptEngine


def pause(taken: Path, seconds: float, late: float) -> None:
    """Make each operation of the script wait before it begins, unless the rank follows others.

    Args:
        taken: File for the samples of each gradient.
        seconds: Pause of all ranks.
        late: Further pause of one rank, which is drawn for each operation.
    """
    operate = ScriptEngine.operate

    def slowly(engine: ScriptEngine, *given: Any, **named: Any) -> Any:
        path = engine.operations.path
        if not path.follows:
            drawn = random.Random(str(path.here)).randrange(engine.slots)
            time.sleep(seconds + (late if drawn == engine.place else 0.0))
        if (samples := named.get("samples", 0)) and not path.skips:
            with taken.open("a") as file:
                file.write(f"{samples}\n")
        return operate(engine, *given, **named)

    call = ScriptEngine._call

    def wakes_slowly(engine: ScriptEngine, event: Any) -> Any:
        resume = call(engine, event)
        if late and resume.late:
            time.sleep(late)  # the others make the next step before this rank has read its average
        return resume

    setattr(ScriptEngine, "operate", slowly)  # noqa: B010
    setattr(ScriptEngine, "_call", wakes_slowly)  # noqa: B010


def redirect(folder: Path) -> Path:
    """Let stdout and stderr of this process go to files that are named after the rank.

    Args:
        folder: Folder of the files.

    Returns:
        Path of a further file of this process.
    """
    settings = RankSettings.from_environment(os.environ)
    assert settings is not None, "redirected.py runs in a rank of a job"
    member = settings.member
    for fd, kind in ((1, "stdout"), (2, "stderr")):
        path = folder / f"{member.slot}-{member.attempt}.{kind}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    return folder / f"{member.slot}-{member.attempt}.taken"


if __name__ == "__main__":
    taken = redirect(Path(sys.argv[1]))
    pause_s, late_s = map(float, sys.argv[2:4])
    if pause_s or late_s:
        pause(taken, pause_s, late_s)
    sys.exit(main(sys.argv[4:]))
