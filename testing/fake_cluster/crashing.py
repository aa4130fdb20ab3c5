"""The operator, but its process dies at its n-th write.

`python -m testing.fake_cluster.crashing N`.

N > 0: right before the request is sent. N < 0: after the API server has carried it out, before the
operator knows. The operator's own options follow.
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
    at = 0
    seen = 0

    async def request(self, method: str, target: str, **more: Any) -> Mapping[str, Any]:
        if method != "GET":
            Crashing.seen += 1
            if Crashing.seen == self.at:
                os._exit(KILLED)
            if Crashing.seen == -self.at:
                await super().request(method, target, **more)
                os._exit(KILLED)
        return await super().request(method, target, **more)


if __name__ == "__main__":
    Crashing.at = int(sys.argv.pop(1))
    setattr(main, "Kube", Crashing)  # noqa: B010
    sys.exit(program.main())
