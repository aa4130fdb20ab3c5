"""What the API server does not let the operator do, in words that say what to mend.

A right that is missing looks like any other refusal to who has not installed the cluster's roles:
the sentence says which verb on which resource it is about, and where the roles come from.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline_operator.cluster.api import ApiError

TARGET: Final = re.compile(
    r"/(?:api/[^/]+|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/.+)?"
)
VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
TEXT_MAX: Final = 500
HINT: Final = (
    "upgrade the chart paceline, whose roles hold this right, or give it to the operator's service "
    "account; a right in one namespace is enough with scope.clusterWide=false (--namespace)"
)


def asked(method: str, target: str, *, watch: bool = False) -> str:
    """A request in the words of a role: `list trainingjobs.paceline.dev in all namespaces`."""
    found = TARGET.fullmatch(target)
    if found is None:
        return f"{method.lower()} {target}"
    verb = VERBS.get(method) or ("watch" if watch else "get" if found["name"] else "list")
    kind = ".".join(filter(None, (found["resource"], found["group"])))
    where = f"namespace {found['namespace']}" if found["namespace"] else "all namespaces"
    return f"{verb} {kind} in {where}"


def denied(what: str, said: str) -> PacelineError:
    """`said`: the API server's own words."""
    return PacelineError(
        f"the operator may not {what}: {said}", hint=HINT, exit_code=EXIT_BAD_INPUT
    )


def words_of(raw: bytes) -> tuple[str, str]:
    """Reason and message of a refusal. A proxy's page is shown as it is."""
    try:
        status = msgspec.json.decode(raw)
    except UNDECODABLE:
        status = None
    found = status if isinstance(status, dict) else {}
    message = str(found.get("message") or raw[:TEXT_MAX].decode(errors="replace"))
    return str(found.get("reason") or ""), message


def told(error: ApiError) -> str:
    """For the log: with the way out, where it is a right that is missing."""
    if not error.denied:
        return str(error)
    missing = denied(error.denied, error.message)
    return f"{missing.message}; {missing.hint}"
