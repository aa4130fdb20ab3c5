"""Tokens with which agents call their coordinator, and their rotation (C2).

A pod starts with one token in its environment. A file, mounted from a Secret that need not exist,
replaces it. The first token in the file is the one that agents send, and a coordinator accepts all
of them. So a token is rotated in two steps. Once the new token stands before the old one, both are
accepted. Once the old one is removed, each connection that uses it is closed.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

from paceline_api.bounded import read_file
from paceline_api.times import NS_PER_MS

from paceline.clock import now_ns

log = logging.getLogger("paceline.control")

TOKENS_MAX: Final = 8
"""Maximum number of tokens in the file."""
TOKEN: Final = re.compile(r"[!-~]{16,256}")
"""Pattern of a token: visible ASCII characters, as an HTTP header allows them."""
FILE_BYTES_MAX: Final = 4 * 1024
"""Maximum size of the file, in bytes."""
LOOK_EVERY_NS: Final = 100 * NS_PER_MS
"""Minimum interval between two looks at the file. A coordinator asks for one with each event, thus
at least with each heartbeat."""


def read_tokens(data: bytes) -> tuple[str, ...]:
    """Return the tokens in a file, one per line.

    Args:
        data: Content of the file. Blank lines are ignored.

    Returns:
        At least one and at most `TOKENS_MAX` tokens, in the order of the file.

    Raises:
        ValueError: The file is too large, or a token is malformed. The message holds no token.
    """
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        tokens = tuple(line for raw in data.decode("ascii").splitlines() if (line := raw.strip()))
    except UnicodeDecodeError:
        raise ValueError("it is no ASCII text") from None
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise ValueError(f"it must have 1 to {TOKENS_MAX} lines, one for each token")
    for number, token in enumerate(tokens, 1):
        if not TOKEN.fullmatch(token):
            raise ValueError(f"token {number} must have 16 to 256 visible characters")
    return tokens


class Tokens:
    """Tokens that are valid now. All calls come from one thread."""

    def __init__(self, first: str, file: Path | None) -> None:
        """Start with the token of the environment.

        Args:
            first: The token that is valid while there is no file.
            file: The file that replaces it; None if nothing does.
        """
        self._first, self._file = (first,), file
        self._identity: tuple[int, int, int] | None = None
        self._looked_ns: int | None = None
        self.accepted: tuple[str, ...] = self._first

    @property
    def own(self) -> str:
        """The token to send, after a look at the file."""
        self._looked_ns = None
        self.look()
        return self.accepted[0]

    def look(self) -> bool:
        """Return True if the valid tokens have changed since the last look.

        A file that cannot be used changes nothing, and is reported in the log once per version of
        the file.

        Returns:
            True after a change.
        """
        now = now_ns()
        early = self._looked_ns is not None and now - self._looked_ns < LOOK_EVERY_NS
        if self._file is None or early:
            return False
        self._looked_ns = now
        try:
            tokens = self._read_if_new(self._file)
        except (OSError, ValueError) as error:
            log.warning("the tokens in %s are not used: %s", self._file, error)
            return False
        if tokens is None or tokens == self.accepted:
            return False
        self.accepted = tokens
        log.info("%d tokens of agents are accepted now", len(tokens))
        return True

    def _read_if_new(self, file: Path) -> tuple[str, ...] | None:
        try:
            state = file.stat()
        except FileNotFoundError:
            self._identity = None
            return self._first
        identity = (state.st_ino, state.st_mtime_ns, state.st_size)
        if identity == self._identity:
            return None
        self._identity = identity
        return read_tokens(read_file(file, FILE_BYTES_MAX))
