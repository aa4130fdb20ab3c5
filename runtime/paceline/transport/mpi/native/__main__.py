"""`python -m paceline.transport.mpi.native`: build the native loop beside its source.

For the making of an image whose users have no compiler.
"""

from __future__ import annotations

import sys

from paceline.transport.mpi.native import SOURCE, UnavailableError, build

try:
    build(SOURCE.parent)
except (UnavailableError, OSError) as error:
    sys.exit(f"paceline.transport.mpi.native: {error}")
