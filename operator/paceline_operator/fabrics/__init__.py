"""The built-in fabric profiles: one file each, in the form of an object of the cluster (C13).

The profiles `tcp` and `template`, which add nothing, are always present as well.

What each network requires of a pod is taken from the documents of its device plugin or provider,
which each file names. None has been tried on its hardware yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import yaml
from paceline_api.types.fabric import OWN, OWN_SPEC, PLAIN, PLAIN_SPEC, FabricProfile, FabricSpec


@cache
def built_in() -> Mapping[str, FabricSpec]:
    """Return the built-in profiles by name."""
    specs = {PLAIN: PLAIN_SPEC, OWN: OWN_SPEC}
    for file in sorted(files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            profile = FabricProfile.model_validate(yaml.safe_load(file.read_text()))
            specs[profile.metadata.name] = profile.spec
    return specs
