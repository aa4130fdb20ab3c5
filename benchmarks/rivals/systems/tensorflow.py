"""TensorFlow's ParameterServerStrategy: a chief, one parameter server, P workers, all over gRPC.

The strategy is asynchronous: each worker reads all weights, computes, and has its gradients
subtracted on the server. A data set that sleeps stands for the computing, in fifteenths: five
forward and ten backward. After each backward wait, the gradients of as many tensors leave.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from benchmarks.network import free_port
from benchmarks.rivals.rank import RATE, Device, System

FORWARD, BACKWARD = 5, 10
"""Number of forward and of backward waits in a step."""


class Process(System):
    """Process of the cluster: workers first, then the server, and the chief at the end."""

    def __init__(self, place: int, ranks: int) -> None:
        self.rank, self.ranks = place, ranks
        self.serves = place != ranks + 1
        self.address = f"127.0.0.1:{free_port()}"
        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"tensorflow": tf.__version__}

    def open(self, addresses: list[str]) -> None:
        """Start this process's server, or, in the chief, the coordinator of the strategy."""
        *workers, server, chief = addresses
        spec = tf.train.ClusterSpec({"worker": workers, "ps": [server], "chief": [chief]})
        if self.serves:
            job = ("worker", self.rank) if self.rank < self.ranks else ("ps", 0)
            tf.distribute.Server(spec, job_name=job[0], task_index=job[1], protocol="grpc")
            return
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def trainer(self, tensors: Sequence[int]) -> Cluster:
        """Return the cluster's training loop."""
        return Cluster(self, tensors)


class Cluster:
    """Weights on the server, and the step that the workers run."""

    def __init__(self, chief: Process, tensors: Sequence[int]) -> None:
        self._chief = chief
        with chief.strategy.scope():
            self._weights = [tf.Variable(tf.zeros([elements])) for elements in tensors]
        self._step = tf.function(self._work)

    def _work(self, waits: Any) -> None:
        weights = [weight.read_value() for weight in self._weights]
        with tf.control_dependencies(weights):
            now = self._wait(waits, FORWARD)
        share = -(-len(weights) // BACKWARD)
        for begin in reversed(range(0, len(weights), share)):
            with tf.control_dependencies([now]):
                now = self._wait(waits, 1)
            for index in range(begin, min(begin + share, len(weights))):
                with tf.control_dependencies([now]):
                    # Always 1, but the graph optimizer cannot know: weights are fetched.
                    gradient = tf.clip_by_value(weights[index], 1.0, 1.0)
                    self._weights[index].assign_sub(gradient * (RATE / self._chief.ranks))

    @staticmethod
    def _wait(waits: Any, times: int) -> Any:
        for _ in range(times):
            with tf.control_dependencies([waits.get_next()]):
                now = tf.no_op()
        return now

    def train(self, device: Device, steps: int) -> None:
        """Let the workers run `steps` steps each."""
        us = round(1e6 * device.step_s / (FORWARD + BACKWARD))

        def asleep() -> Any:
            options = tf.data.Options()
            options.autotune.enabled = False
            options.experimental_optimization.inject_prefetch = False
            ones = tf.data.Dataset.from_tensors(1).repeat()
            return ones.apply(testing.sleep(us)).with_options(options)

        coordinator = self._chief.coordinator
        waits = iter(coordinator.create_per_worker_dataset(asleep))
        for _ in range(steps * self._chief.ranks):
            coordinator.schedule(self._step, args=(waits,))
        coordinator.join()

    def corners(self) -> tuple[float, float]:
        """Return the first and the last weight."""
        return float(self._weights[0].numpy()[0]), float(self._weights[-1].numpy()[-1])


def make(_: list[str]) -> System:
    """Return the process that the environment names."""
    return Process(int(os.environ["RANK"]), int(os.environ["RIVALS_RANKS"]))
