"""Builds the native loops beside their sources: `python -m paceline.transport.native`.

The build of an image runs it, since users of the image may have no compiler.
"""

from __future__ import annotations

import sys

from paceline.transport.native import SOURCES, UnavailableError, build

try:
    for source in SOURCES:
        build(source, source.parent)
except (UnavailableError, OSError) as error:
    sys.exit(f"paceline.transport.native: {error}")
