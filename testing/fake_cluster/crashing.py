"""The operator, except that its process dies at its n-th write.

`python -m testing.fake_cluster.crashing N` with N > 0 dies right before the request is sent. With N
< 0 it dies after the API server has carried the request out and before the operator learns of it.
The operator's own options follow N.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from paceline_operator import __main__ as program
from paceline_operator import main
from paceline_operator.cluster.kube import Kube

KILLED = 137


class Crashing(Kube):
    """API client that ends the process at the write number `at`."""

    at = 0
    calls = 0

    async def request(self, method: str, target: str, **more: Any) -> Mapping[str, Any]:
        """Send a request, and exit before or after it if its turn has come."""
        if method != "GET":
            Crashing.calls += 1
            if Crashing.calls == self.at:
                os._exit(KILLED)
            if Crashing.calls == -self.at:
                await super().request(method, target, **more)
                os._exit(KILLED)
        return await super().request(method, target, **more)


if __name__ == "__main__":
    Crashing.at = int(sys.argv.pop(1))
    setattr(main, "Kube", Crashing)  # noqa: B010
    sys.exit(program.main())
