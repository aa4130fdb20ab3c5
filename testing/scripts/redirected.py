"""Start a script in a rank of a job, with its stdout and stderr in files of their own.

python redirected.py FOLDER PACE_S SCRIPT [arguments]

FOLDER gets `SLOT-ATTEMPT.stdout` and `SLOT-ATTEMPT.stderr`. Each step of an optimizer takes PACE_S
seconds longer, so that a fault of a test finds a script of a few steps still at work.
"""

import os
import sys
import time
from pathlib import Path

from paceline.environment import RankSettings
from paceline.train.script.launch import main
from torch.optim.optimizer import register_optimizer_step_post_hook


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
    pace_s = float(sys.argv[2])
    register_optimizer_step_post_hook(lambda *_: time.sleep(pace_s))
    sys.exit(main(sys.argv[3:]))
