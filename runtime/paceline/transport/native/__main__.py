"""`python -m paceline.transport.native`: build the native loops beside their sources.

For the making of an image whose users have no compiler.
"""

from __future__ import annotations

import sys

from paceline.transport.native import SOURCES, UnavailableError, build

try:
    for source in SOURCES:
        build(source, source.parent)
except (UnavailableError, OSError) as error:
    sys.exit(f"paceline.transport.native: {error}")
