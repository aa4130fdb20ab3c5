"""What a decoder raises for bytes that somebody else has written.

msgspec has an error of its own, and lets two of Python's through: for values that are nested too
deeply, also where nobody asks for them, and for text that is no UTF-8.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)
