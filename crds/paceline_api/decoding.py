"""Exceptions that a decoder raises for untrusted bytes.

msgspec raises an error of its own and two of Python's: RecursionError for values that are nested
too deeply, even in fields that are not decoded, and UnicodeError for text that is not UTF-8.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)
