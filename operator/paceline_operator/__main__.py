"""The operator as a process: `python -m paceline_operator`.

Exit codes: 0 ended by a signal, 1 failure, 2 options or surroundings are wrong, 3 lost the lead.
"""

from __future__ import annotations

import sys

from paceline_api.errors import PacelineError

from paceline_operator import logs
from paceline_operator.main import run
from paceline_operator.options import parse


def main() -> int:
    """Run the operator with the options of the command line, and return its exit code."""
    options = parse()
    logs.set_up(options.log_format, options.log_level)
    try:
        return run(options)
    except PacelineError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
