"""Messages about rights that the operator lacks: verb, resource and remedy.

To a user who did not install the cluster's roles, a missing right looks like any other refusal.
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
"""Path of a request to the API server."""
VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
"""Verbs of a role by HTTP method; GET is one of get, list and watch."""
TEXT_MAX: Final = 500
"""Upper bound on the bytes of a foreign error page that a message quotes."""
HINT: Final = (
    "upgrade the chart paceline, whose roles hold this right, or give it to the operator's service "
    "account; a right in one namespace is enough with scope.clusterWide=false (--namespace)"
)
"""Remedy for a missing right."""


def asked(method: str, target: str, *, watch: bool = False) -> str:
    """Describe a request in the terms of a role.

    An example is `list trainingjobs.paceline.dev in all namespaces`.

    Args:
        method: HTTP method.
        target: Path of the request.
        watch: True if the request is a watch.

    Returns:
        The text; method and path if the path is not one of a resource.
    """
    match = TARGET.fullmatch(target)
    if match is None:
        return f"{method.lower()} {target}"
    verb = VERBS.get(method) or ("watch" if watch else "get" if match["name"] else "list")
    kind = ".".join(filter(None, (match["resource"], match["group"])))
    where = f"namespace {match['namespace']}" if match["namespace"] else "all namespaces"
    return f"{verb} {kind} in {where}"


def denied(what: str, message: str) -> PacelineError:
    """Return the error for a missing right, with the API server's message."""
    return PacelineError(
        f"the operator may not {what}: {message}", hint=HINT, exit_code=EXIT_BAD_INPUT
    )


def words_of(raw: bytes) -> tuple[str, str]:
    """Return reason and message of a refusal; the page of a proxy is quoted as it is."""
    try:
        status = msgspec.json.decode(raw)
    except UNDECODABLE:
        status = None
    fields = status if isinstance(status, dict) else {}
    message = str(fields.get("message") or raw[:TEXT_MAX].decode(errors="replace"))
    return str(fields.get("reason") or ""), message


def describe(error: ApiError) -> str:
    """Return an error as text for the log, with the remedy if a right is missing."""
    if not error.denied:
        return str(error)
    missing = denied(error.denied, error.message)
    return f"{missing.message}; {missing.hint}"
