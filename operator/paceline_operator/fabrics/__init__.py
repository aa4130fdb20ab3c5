"""The built-in fabric profiles: one file each, in the form of an object of the cluster (C13).

Beside them `tcp`, which adds nothing, is always there.

What each network asks of a pod is taken from the documents of its device plugin or provider; each
file names them. None has been tried on its hardware yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import yaml
from paceline_api.types.fabric import PLAIN, PLAIN_SPEC, FabricProfile, FabricSpec


@cache
def built_in() -> Mapping[str, FabricSpec]:
    """By name."""
    found = {PLAIN: PLAIN_SPEC}
    for file in sorted(files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            profile = FabricProfile.model_validate(yaml.safe_load(file.read_text()))
            found[profile.metadata.name] = profile.spec
    return found
