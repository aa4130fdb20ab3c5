"""FabricProfile: what the worker pods of a job need to reach a fast network, by name.

There is one profile for each kind of network: which nodes have it, and what a pod must request and
set to use it. `spec.fabric.profile` of a job names one. Some are built into the operator; an object
of the cluster with the same name replaces a built-in one (C13).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from paceline_api.types.enums import DnsPolicy, FabricRequirement, NodeOperator
from paceline_api.types.model import Count, Model, OpenModel, Text
from paceline_api.types.template import EnvVar

FABRIC_KIND: Final = "FabricProfile"
FABRIC_PLURAL: Final = "fabricprofiles"
ALL: Final = "All"
"""Amount of a resource: as much as each node offers."""
AMOUNT_MAX: Final = 4096
PARTS_MAX: Final = 16


def _check_amount(value: Any) -> int | str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == ALL or (whole and 1 <= value <= AMOUNT_MAX):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"is neither All nor a number from 1 to {AMOUNT_MAX}")


Amount = Annotated[
    int | str,
    PlainValidator(_check_amount),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 16,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == int ? (self >= 1 && self <= {AMOUNT_MAX}) : "
                    f"self == '{ALL}'",
                    "message": f"is neither All nor a number from 1 to {AMOUNT_MAX}; write how "
                    "many of the resource a pod gets, or All for what a node offers",
                }
            ],
        }
    ),
]
Parts = Annotated[tuple[dict[str, Any], ...], Field(max_length=PARTS_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Words = Annotated[dict[str, str], Field(max_length=64)]


class NamedPart(OpenModel):
    """One part of a pod that has a name."""

    name: Name
    """Name of the part; a part of that name in the template is kept."""


class MountPart(OpenModel):
    """One volume that the trainer mounts."""

    mount_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path in the container; if the template mounts something there, that is kept."""

    name: Name
    """Name of the volume."""


NamedParts = Annotated[tuple[NamedPart, ...], Field(max_length=PARTS_MAX)]


Label = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63)]


class NodeExpression(Model):
    """A condition on one label of a node, as in a node affinity."""

    key: Label
    """Key of the label."""

    operator: NodeOperator
    """In: the label has one of the values. NotIn: it has none of them, or is missing. Exists,
    DoesNotExist: it is there with any value, or missing."""

    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """The values of In and NotIn; Exists and DoesNotExist have none."""


class FabricMatch(Model):
    """Which nodes have the network, beside offering the resources of `pod.resources`.

    `auto` picks the profile only on such nodes. A job that names the profile gets it anyway.
    """

    node_labels: Words | None = None
    """Labels that such a node has, with these values."""

    node_expressions: Annotated[tuple[NodeExpression, ...], Field(max_length=PARTS_MAX)] | None = (
        None
    )
    """Conditions on its labels, all of which such a node meets."""


class FabricPod(Model):
    """What is added to a worker's pod. What the job's template says itself stays."""

    annotations: Words | None = None
    """Annotations, such as the further networks that a pod is attached to."""

    node_selector: Words | None = None
    """Labels of nodes on which such pods may run."""

    tolerations: Parts | None = None
    """Taints of nodes that such pods tolerate, as in a pod."""

    resources: Annotated[dict[str, Amount], Field(max_length=PARTS_MAX)] | None = None
    """Resources of device plugins that the trainer gets, with how many of each: a number, or All
    for as many as the nodes offer."""

    resource_claims: NamedParts | None = None
    """Claims of dynamic resource allocation, as in a pod; the trainer gets all of them."""

    host_network: bool | None = None
    """true: such pods use the network of their node. dnsPolicy must be ClusterFirstWithHostNet,
    or they would not find their coordinator; if the template decides it, that is kept."""

    dns_policy: DnsPolicy | None = None
    """How such pods resolve names: ClusterFirst, or ClusterFirstWithHostNet with hostNetwork."""

    privileged: bool | None = None
    """true: the trainer is privileged and has all devices and capabilities of its node."""

    capabilities: Annotated[tuple[Text, ...], Field(max_length=PARTS_MAX)] | None = None
    """Capabilities that the trainer gets, such as IPC_LOCK. They have an effect for root only, and
    keep the pods out of namespaces that enforce baseline or restricted pod security."""

    run_as_user: Count | None = None
    """User as which the trainer runs, unless the template says so; 0, root, for capabilities."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] | None = None
    """Environment variables of the trainer, such as NCCL_IB_HCA."""

    volumes: NamedParts | None = None
    """Volumes, as in a pod."""

    volume_mounts: Annotated[tuple[MountPart, ...], Field(max_length=PARTS_MAX)] | None = None
    """Where the trainer sees these volumes, as in a container."""

    init_containers: NamedParts | None = None
    """Further init containers and, with restartPolicy Always, sidecars, as in a pod."""


class FabricSpec(Model):
    """A kind of network and how pods get it."""

    description: Annotated[str, Field(max_length=1024)] | None = None
    """What network it is and what it needs on the nodes, for people."""

    carries: FabricRequirement
    """The best that a job can reach with it, as in spec.fabric.required of a job."""

    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """`auto` takes the profile with the highest priority of those that fit; 0 if unset."""

    match: FabricMatch | None = None
    """Which nodes have the network. A profile that matches by nothing and asks for no resource is
    never picked by `auto`."""

    pod: FabricPod | None = None
    """What is added to a worker's pod."""


class FabricMetadata(Model):
    """Metadata of a FabricProfile."""

    name: Annotated[str, Field(max_length=253)]
    """Name by which jobs ask for it."""


class FabricProfile(Model):
    """A kind of network between the workers of a job, and what their pods need to use it."""

    api_version: Literal["paceline.dev/v1alpha1"]
    """paceline.dev/v1alpha1"""

    kind: Literal["FabricProfile"]
    """FabricProfile"""

    metadata: FabricMetadata
    """Name of the profile."""

    spec: FabricSpec
    """The network and what pods need."""


PLAIN: Final = "tcp"
PLAIN_SPEC: Final = FabricSpec(
    description="The pods' own network over TCP. Adds nothing to a pod.",
    carries=FabricRequirement.ANY,
)
"""The profile that `auto` falls back to; it needs no device plugin."""
OWN: Final = "template"
OWN_SPEC: Final = FabricSpec(
    description="The network that the job's template asks for itself. Adds nothing to a pod.",
    carries=FabricRequirement.GPU_DIRECT,
)
"""The profile of a job whose template asks for a network itself; `auto` recognizes it."""
AUTO: Final = "auto"
"""Value of `spec.fabric.profile` of a job that lets the operator choose."""
