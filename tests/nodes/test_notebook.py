"""The notebook of `examples/` trains in pods of a cluster as well as the example with files."""

from __future__ import annotations

import json
import os
from typing import Any

import nbformat
import pytest

from testing.jobs.notebook import ACCURACY, RUN_S, executed, result
from tests.nodes.jobs import NewJob, on_these_nodes
from tests.nodes.platform import Platform
from tests.nodes.test_verbs import kubeconfig_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(RUN_S)]

HERE = """\
import functools, json
client.train = functools.partial(client.train, template=json.loads(os.environ["TEMPLATE"]))
"""
"""Make the pods of these nodes use the Python of the test run; other pods use the release's image.
"""


def test_a_notebook_function_trains_as_well_as_the_example(
    platform: Platform, new_job: NewJob
) -> None:
    job = new_job("digits-notebook")
    kubeconfig = kubeconfig_of(platform, job, "anna", "edit")
    plain: dict[str, Any] = {"spec": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}}
    template = on_these_nodes(plain)["spec"]["template"]
    cells = executed(
        job.folder,
        {"place": nbformat.v4.new_code_cell(HERE)},  # type: ignore[no-untyped-call]
        PLACE="cluster",
        KUBECONFIG=str(kubeconfig),
        TEMPLATE=json.dumps(template),
        HOME=os.environ["HOME"],
    )
    assert f"namespace {job.namespace} of https://" in result(cells["place"])
    assert result(cells["wait"]).startswith("('Complete', ")
    assert float(result(cells["accuracy"])) >= ACCURACY
    assert not job.pods(), "deleted with its pods"
