"""Parts that all models of a TrainingJob share: base classes, camelCase in YAML, scalar types.

The docstring under a field is its description in the CRD. A field that is not set stays None, so
that a stored job shows what its user wrote. `behaviour(...)` declares the default that `defaults`
fills in; the CRD's description says it, and when a change of the field acts (`fields.ACTS`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from paceline_api.ids import PROCS_MAX
from paceline_api.types.durations import (
    DURATION_CHARS_MAX,
    DURATION_PATTERN,
    PERCENT_PATTERN,
    parse_duration,
    parse_percent,
)

DEFAULT_KEY: Final = "paceline-default"
SPEC_PROBLEM: Final = "spec_problem"
"""Type of the errors below; their context has `problem` and `hint`."""

COUNT_MAX: Final = 2_147_483_647
DEVICES_PATTERN: Final = r"^[0-9]{1,3}$"
QUORUM_PATTERN: Final = r"^([1-9][0-9]?|100)%$"
REPLICAS_MAX: Final = 10_000
MODEL_MAX: Final = 64


class Model(BaseModel):
    """Base class of the parts of a job that Paceline defines: an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class OpenModel(Model):
    """Base class of the parts that Kubernetes defines: unknown fields are kept as they are."""

    model_config = ConfigDict(extra="allow")


def behaviour(default: Any = None) -> Any:
    """Declare a field that is None until `defaults` sets it to `default` (C12).

    Args:
        default: The default; None if there is none.

    Returns:
        The pydantic field.
    """
    return Field(default=None, json_schema_extra={DEFAULT_KEY: default})


def _problem(problem: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError(SPEC_PROBLEM, "{problem}", {"problem": problem, "hint": hint})


def _check_duration(value: Any) -> str:
    if isinstance(value, str):
        try:
            parse_duration(value)
        except ValueError:
            pass
        else:
            return value
        if value.startswith("-"):
            raise _problem("is negative", 'use a duration of "0s" or more, such as 50ms')
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise _problem("has no unit", f"write {value}ms or {value}s" if value > 0 else 'write "0s"')
    raise _problem("is not a duration", _DURATION_HINT)


def _check_percent(value: str, example: str) -> str:
    try:
        percent = parse_percent(value)
    except ValueError:
        number = value[:-1]
        if number.isdecimal() and int(number) > 100:
            raise _problem("is more than 100%", f"use 1% to 100%, such as {example}") from None
        if number.startswith("-"):
            raise _problem("is negative", f"use 1% to 100%, such as {example}") from None
        raise _problem("is not a whole percentage", f"write it as {example}") from None
    return f"{percent}%"


def _check_quorum(value: Any) -> int | str:
    hint = _QUORUM_HINT
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= COUNT_MAX:
            raise _problem("is less than 1" if value < 1 else "is too large", hint)
        return value
    if isinstance(value, str) and value.endswith("%"):
        if _check_percent(value, "75%") == "0%":
            raise _problem("is less than one rank", hint)
        return value
    raise _problem("is neither a number of ranks nor a percentage", hint)


def _check_grace(value: Any) -> str:
    if isinstance(value, str) and value.endswith("%"):
        return _check_percent(value, "5%")
    return _check_duration(value)


def _check_auto_duration(value: Any) -> str:
    return "auto" if value == "auto" else _check_duration(value)


def _check_devices(value: Any) -> int | str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and not (isinstance(value, str) and re.fullmatch(DEVICES_PATTERN, value)):
        raise _problem("is not a number of GPUs", _DEVICES_HINT)
    if not 0 <= int(value) <= PROCS_MAX:
        raise _problem(f"is not 0 to {PROCS_MAX}", _DEVICES_HINT)
    checked: int | str = value
    return checked


def _not_blank(value: str) -> str:
    if not value.strip():
        raise _problem("is empty", "give a value or remove the field")
    return value


def _text_schema(pattern: str, message: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "string",
            "maxLength": DURATION_CHARS_MAX,
            "minLength": 1,
            # Use a rule instead of `pattern`: the error of a pattern does not say what to do.
            "x-kubernetes-validations": [_rule(f"self.matches('{pattern}')", message)],
        }
    )


def _rule(rule: str, message: str) -> dict[str, str]:
    return {"rule": rule.replace("\\", "\\\\"), "message": message}


_DURATION_BODY: Final = DURATION_PATTERN[1:-1]
_DURATION_HINT: Final = "write a number and a unit, such as 50ms, 2s or 1m30s"
_DEVICES_HINT: Final = f"use 0 to {PROCS_MAX}, such as 8"
_QUORUM_HINT: Final = "use a number of ranks such as 3, or a percentage such as 75%"
Duration = Annotated[
    str,
    PlainValidator(_check_duration),
    _text_schema(DURATION_PATTERN, f"is not a duration; {_DURATION_HINT}"),
]
AutoDuration = Annotated[
    str,
    PlainValidator(_check_auto_duration),
    _text_schema(f"^(auto|{_DURATION_BODY})$", f"is neither auto nor a duration; {_DURATION_HINT}"),
]
Grace = Annotated[
    str,
    PlainValidator(_check_grace),
    _text_schema(
        f"^({PERCENT_PATTERN[1:-1]}|{_DURATION_BODY})$",
        f"is neither a percentage from 0% to 100% nor a duration; {_DURATION_HINT}, or 5%",
    ),
]
Quorum = Annotated[
    int | str,
    PlainValidator(_check_quorum),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 1,
            "maximum": COUNT_MAX,
            "maxLength": 16,
            "x-kubernetes-validations": [
                _rule(
                    f"type(self) == int || self.matches('{QUORUM_PATTERN}')",
                    f"is neither a number of ranks nor 1% to 100%; {_QUORUM_HINT}",
                )
            ],
        }
    ),
]

Devices = Annotated[
    int | str,
    PlainValidator(_check_devices),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": PROCS_MAX,
            "maxLength": 16,
            # An API server before 1.34 ignores maxLength when it estimates the cost of a rule, and
            # rejects a longer pattern or a second match as too expensive. The operator rejects what
            # this rule lets through: "257" to "999".
            "x-kubernetes-validations": [
                _rule(
                    "type(self) == int || (size(self) > 0 && size(self) < 4 && "
                    "!self.matches('\\D'))",
                    f"is not a number of GPUs; {_DEVICES_HINT}",
                )
            ],
        }
    ),
]

Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, Strict(), Field(ge=1, le=COUNT_MAX)]
Replicas = Annotated[int, Strict(), Field(ge=1, le=REPLICAS_MAX)]
Procs = Annotated[int, Strict(), Field(ge=1, le=PROCS_MAX)]
ModelParallel = Annotated[int, Strict(), Field(ge=1, le=MODEL_MAX)]
Port = Annotated[int, Strict(), Field(ge=1024, le=65535)]
Number = Annotated[float, Strict()]
Text = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_not_blank)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_not_blank)]
