"""Mistakes that users make in a job file: the change, the field that must be named, the advice.

They are data, since the same table is tested on the models and, if there is a cluster, on the API
server.
"""

from __future__ import annotations

from typing import NamedTuple

GOOD = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata:
  name: digits
spec:
  replicas: 4
  procsPerReplica: 2
  collective:
    mode: Quorum
    quorum: 6
  template:
    spec:
      containers:
        - name: trainer
          image: registry.example/digits:1
          command: [python, train.py]
          env:
            - name: OMP_NUM_THREADS
              value: "1"
"""


class Bad(NamedTuple):
    """One mistake, as a replacement in GOOD, and what the error must contain."""

    old: str
    """Text of GOOD that is replaced by `new`."""
    new: str
    path: str
    problem: str
    hint: str

    @property
    def text(self) -> str:
        """The job file with the mistake."""
        assert GOOD.count(self.old) == 1, self.old
        return GOOD.replace(self.old, self.new)


def _collective(lines: str, path: str, problem: str, hint: str) -> Bad:
    return Bad("    mode: Quorum\n", f"    {lines}\n", f"spec.collective.{path}", problem, hint)


def _spec(lines: str, path: str, problem: str, hint: str) -> Bad:
    return Bad("  template:\n", f"  {lines}\n  template:\n", f"spec.{path}", problem, hint)


def _replicas(value: str, problem: str, hint: str) -> Bad:
    return Bad("replicas: 4", f"replicas: {value}", "spec.replicas", problem, hint)


def _gpus(value: str, problem: str, hint: str) -> Bad:
    lines = f"resources: {{limits: {{nvidia.com/gpu: {value}}}}}"
    path = f"{TRAINER}.resources.limits.nvidia.com/gpu"
    return Bad("          env:\n", f"          {lines}\n          env:\n", path, problem, hint)


TRAINER = "spec.template.spec.containers[0]"

BAD: dict[str, Bad] = {
    # Misspelt and misplaced fields
    "spec misspelt": Bad("\nspec:", "\nspecs:", "specs", "is not a field", "did you mean spec?"),
    "field misspelt": Bad(
        "  collective:", "  colective:", "spec.colective", "is not a field",
        "did you mean collective?",
    ),
    "field in snake case": Bad(
        "procsPerReplica", "procs_per_replica", "spec.procs_per_replica", "is not a field",
        "did you mean procsPerReplica?",
    ),
    "field with wrong capitals": _collective(
        "warmuprounds: 3", "warmuprounds", "is not a field", "did you mean warmupRounds?"
    ),
    "field of another operator": Bad(
        "procsPerReplica", "slotsPerWorker", "spec.slotsPerWorker", "is not a field",
        "use procsPerReplica instead",
    ),
    "field of the papers": _collective(
        "lateGradients: Drop", "lateGradients", "is not a field", "use maxAgePolicy instead"
    ),
    "field in the wrong place": _spec(
        "quorum: 3", "quorum", "is not a field", "quorum belongs into spec.collective"
    ),
    "unknown field": _spec("sidecar: 1", "sidecar", "is not a field", "its fields are replicas"),
    "template misspelt": Bad(
        "  template:", "  tmplate:", "spec.tmplate", "is not a field", "did you mean template?"
    ),
    "containers misspelt": Bad(
        "containers:", "contaners:", "spec.template.spec.containers", "is missing",
        "did you mean containers instead of contaners?",
    ),
    "name missing": Bad(
        "  name: digits", "  labels: {}", "metadata.name", "is missing", "add name to metadata"
    ),
    "wrong kind": Bad(
        "kind: TrainingJob", "kind: Job", "kind", '"Job" is not', "write kind: TrainingJob"
    ),
    "no kind": Bad("kind: TrainingJob\n", "", "kind", "is missing", "write kind: TrainingJob"),
    "wrong version": Bad(
        "v1alpha1", "v1", "apiVersion", '"paceline.dev/v1" is not', "knows no other version"
    ),
    "version misspelt": Bad(
        "apiVersion", "apiversion", "apiVersion", "is missing", "instead of apiversion?"
    ),
    # Values of the wrong type or out of bounds
    "replicas quoted": _replicas('"4"', '"4" is not a whole number', "write 4 without quotes"),
    "replicas zero": _replicas("0", "0 is less than 1", "use 1 to 10000"),
    "replicas negative": _replicas("-2", "-2 is less than 1", "use 1 to 10000"),
    "replicas too many": _replicas("20000", "20000 is more than 10000", "use 1 to 10000"),
    "replicas a fraction": _replicas("2.5", "2.5 is not a whole number", "write a whole number"),
    "replicas a flag": _replicas("yes", "true is not a whole number", "write a whole number"),
    "replicas a word": _replicas("many", '"many" is not a whole number', "write a whole number"),
    "too many processes": Bad(
        "procsPerReplica: 2", "procsPerReplica: 999", "spec.procsPerReplica",
        "999 is more than 256", "use 1 to 256",
    ),
    "GPUs in words": _gpus("eight", '"eight" is not a number of GPUs', "use 0 to 256, such as 8"),
    "too many GPUs": _gpus("999", "999 is not 0 to 256", "use 0 to 256, such as 8"),
    "suspend not a flag": _spec(
        "suspend: 1", "suspend", "1 is neither true nor false", "write true or false"
    ),
    "collective a list": Bad(
        "  collective:\n    mode: Quorum\n    quorum: 6\n", "  collective: [Quorum]\n",
        "spec.collective", "a list is not a mapping", "write its fields below it",
    ),
    "mode of a launched script": Bad(
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")],
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")]
        .replace("mode: Quorum\n    quorum: 6", "mode: Shadow")
        .replace("[python, train.py]", "[paceline, launch, train.py]"),
        "spec.collective.mode", "does not go with a script", "set it to Full",
    ),
    "pipeline of a launched script": Bad(
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")],
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")]
        .replace("mode: Quorum\n    quorum: 6", "mode: Full\n    pipeline: 1")
        .replace("[python, train.py]", "[paceline, launch, train.py]"),
        "spec.collective.pipeline", "does not go with a script", "set it to 0",
    ),
    "model of a launched script": Bad(
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")],
        GOOD[GOOD.index("    mode: Quorum") : GOOD.index("          env:")]
        .replace("mode: Quorum\n    quorum: 6", "mode: Full\n  parallelism: {model: 2}")
        .replace("[python, train.py]", "[paceline, launch, train.py]"),
        "spec.parallelism.model", "does not go with a script", "remove it",
    ),
    "command a text": Bad(
        "command: [python, train.py]", "command: python train.py", f"{TRAINER}.command",
        "is not a list", 'write ["python", "train.py"]',
    ),
    "environment value a number": Bad(
        'value: "1"', "value: 1", f"{TRAINER}.env[0].value", "1 is not text", 'quotes: "1"'
    ),
    "port too low": _spec(
        "metrics: {port: 80}", "metrics.port", "80 is less than 1024", "use 1024 to 65535"
    ),
    "slowdown below one": _spec(
        "straggler: {detect: {slowdownFactor: 0.5}}", "straggler.detect.slowdownFactor",
        "0.5 is not more than 1", "use more than 1 and at most 100",
    ),
    "decay above one": _collective(
        "decayFactor: 1.5", "decayFactor", "1.5 is more than 1", "use 0 to 1"
    ),
    "negative seconds": _spec(
        "elasticity: {settleSeconds: -1}", "elasticity.settleSeconds", "-1 is less than 0",
        "use 0 or more",
    ),
    "no exit code": _spec(
        "failurePolicy: {rules: [{action: FailJob, onExitCodes: [0]}]}",
        "failurePolicy.rules[0].onExitCodes[0]", "0 is less than 1", "use 1 to 255",
    ),
    "checkpoint without a path": _spec(
        "checkpoint: {keep: 2}", "checkpoint.path", "is missing", "add path to spec.checkpoint"
    ),
    "no sizes": _spec(
        "elasticity: {allowedSizes: []}", "elasticity.allowedSizes", "is empty", "remove the field"
    ),
    # Values of enumerations
    "mode misspelt": _collective(
        "mode: Qourum", "mode", '"Qourum" is not one of Full, Quorum', "did you mean Quorum?"
    ),
    "mode in small letters": _collective(
        "mode: full", "mode", '"full" is not one of', "did you mean Full?"
    ),
    "backend of a later release": _collective(
        "backend: ucx", "backend", '"ucx" is not one of auto, mpi, nccl, gloo, shm', "write auto"
    ),
    "response unknown": _spec(
        "straggler: {respond: [Kill]}", "straggler.respond[0]", '"Kill" is not one of Tolerate',
        "write Tolerate",
    ),
    # Durations, percentages, quorum
    "deadline without unit": _collective(
        "deadline: 50", "deadline", "50 has no unit", "write 50ms or 50s"
    ),
    "deadline negative": _collective(
        "deadline: -50ms", "deadline", '"-50ms" is negative', 'use a duration of "0s" or more'
    ),
    "deadline a word": _collective(
        "deadline: soon", "deadline", '"soon" is not a duration', "such as 50ms, 2s or 1m30s"
    ),
    "grace zero without unit": _collective("grace: 0", "grace", "0 has no unit", 'write "0s"'),
    "grace above all": _collective(
        "grace: 101%", "grace", '"101%" is more than 100%', "use 1% to 100%, such as 5%"
    ),
    "quorum above 100%": Bad(
        "quorum: 6", "quorum: 150%", "spec.collective.quorum", '"150%" is more than 100%',
        "use 1% to 100%, such as 75%",
    ),
    "quorum zero": Bad(
        "quorum: 6", "quorum: 0", "spec.collective.quorum", "0 is less than 1", "such as 3, or a"
    ),
    "quorum zero percent": Bad(
        "quorum: 6", "quorum: 0%", "spec.collective.quorum", "is less than one rank", "such as 75%"
    ),
    "quorum a fraction": Bad(
        "quorum: 6", "quorum: 0.75", "spec.collective.quorum",
        "0.75 is neither a number of ranks nor a percentage", "such as 75%",
    ),
    # Rules across fields
    "quorum above the ranks": Bad(
        "quorum: 6", "quorum: 9", "spec.collective.quorum",
        "9 is more than replicas x procsPerReplica = 8", "use 1 to 8, or a percentage such as 75%",
    ),
    "quorum above the replicas": Bad(
        "procsPerReplica: 2\n  collective:\n    mode: Quorum\n    quorum: 6",
        "collective:\n    mode: Quorum\n    quorum: 6", "spec.collective.quorum",
        "6 is more than replicas x procsPerReplica = 4", "use 1 to 4, or a percentage such as 75%",
    ),
    "min above replicas": _spec(
        "minReplicas: 5", "minReplicas", "5 is more than replicas = 4", "use 1 to 4, or set"
    ),
    "max below replicas": _spec(
        "maxReplicas: 3", "maxReplicas", "3 is less than replicas = 4", "use 4 or more, or set"
    ),
    "deadline missing": _collective(
        "mode: Deadline", "deadline", "is missing, and mode Deadline needs it",
        "such as 50ms, or auto",
    ),
    "draw outside majority": _collective(
        "randomInitiator: true", "randomInitiator", "in mode Majority only", "to Majority"
    ),
    "pipeline in shadow": _collective(
        "mode: Shadow\n    pipeline: 1", "pipeline", "does not go with mode Shadow", "another one",
    ),
    "pipeline that waits for all": _collective(
        "pipeline: 1\n    maxAge: 1\n    maxAgePolicy: Wait", "maxAge",
        "lets each round wait for all ranks", "use 2 or more, or 0",
    ),
    "TCP where RDMA is required": Bad(
        "  collective:\n", "  fabric: {required: RDMA}\n  collective:\n    backend: gloo\n",
        "spec.collective.backend",
        '"gloo" uses TCP only, and spec.fabric.required is RDMA', "use mpi, nccl or auto",
    ),
    "no network where RDMA is required": Bad(
        "  collective:\n", "  fabric: {required: RDMA}\n  collective:\n    backend: shm\n",
        "spec.collective.backend",
        '"shm" uses no network, and spec.fabric.required is RDMA', "use mpi, nccl or auto",
    ),
    "host memory where GPUDirect is required": Bad(
        "  collective:\n", "  fabric: {required: GPUDirect}\n  collective:\n    backend: mpi\n",
        "spec.collective.backend",
        '"mpi" sums host memory, and spec.fabric.required is GPUDirect', "use nccl or auto",
    ),
    "a wire type over gloo": Bad(
        "  collective:\n", "  collective:\n    backend: gloo\n    wire: BFloat16\n",
        "spec.collective.wire", '"BFloat16" travels over mpi only',
        "use the backends mpi or auto",
    ),
    "a wire type in shared memory": Bad(
        "  collective:\n", "  collective:\n    backend: shm\n    wire: BFloat16\n",
        "spec.collective.wire", '"BFloat16" travels over mpi only',
        "use the backends mpi or auto",
    ),
    "a wire type where GPUDirect is required": Bad(
        "  collective:\n",
        "  fabric: {required: GPUDirect}\n  collective:\n    wire: BFloat16\n",
        "spec.collective.wire", '"BFloat16" travels over mpi only',
        "no spec.fabric.required: GPUDirect",
    ),
    "size not allowed": _spec(
        "elasticity: {allowedSizes: [2, 8]}", "elasticity.allowedSizes",
        "does not contain replicas = 4 (found: 2, 8)", "add 4, or set spec.replicas to one of 2, 8",
    ),
    "claim at a relative path": _spec(
        "checkpoint: {path: out, claimName: disk}", "checkpoint.path", '"out" is not absolute',
        "begins with /",
    ),
    "queue and elastic": _spec(
        "minReplicas: 2\n  scheduling: {provider: Kueue}", "scheduling.provider",
        "admits a fixed size only", "remove minReplicas",
    ),
    "gang without a provider": _spec(
        "scheduling: {provider: None, gang: {}}", "scheduling.gang",
        "has no effect without a provider", "or remove gang",
    ),
    "gang above replicas": _spec(
        "scheduling: {provider: Volcano, gang: {minCount: 5}}", "scheduling.gang.minCount",
        "5 is more than replicas = 4", "use 1 to 4, or set spec.replicas to 5 or more",
    ),
    "half a gang in a queue": _spec(
        "scheduling: {provider: Kueue, gang: {minCount: 3}}", "scheduling.gang.minCount",
        "3 is less than replicas, and Kueue admits all or none", "with Kueue remove it",
    ),
    "groups that do not fit a pod": _spec(
        "parallelism: {model: 3}", "parallelism.model",
        "3 does not divide procsPerReplica = 2", "set spec.procsPerReplica to 3 or a multiple",
    ),
    "more groups than there are": _spec(
        "parallelism: {model: 2}", "collective.quorum",
        "6 is more than replicas x procsPerReplica / parallelism.model = 4", "use 1 to 4",
    ),
    "groups of nobody": _spec(
        "parallelism: {model: 0}", "parallelism.model", "0 is less than 1", "use 1 to 64",
    ),
    "groups with a pipeline": Bad(
        "    quorum: 6\n", "    pipeline: 1\n  parallelism: {model: 2}\n",
        "spec.collective.pipeline", "does not go with parallelism.model above 1", "remove it",
    ),
    "groups with a short wire": Bad(
        "    quorum: 6\n", "    wire: BFloat16\n  parallelism: {model: 2}\n",
        "spec.collective.wire", "does not go with parallelism.model above 1", "remove it",
    ),
    "failure rule about nothing": _spec(
        "failurePolicy: {rules: [{action: Ignore}]}", "failurePolicy.rules[0]",
        "without onExitCodes and onReasons", "onExitCodes: [2]",
    ),
    "name with capitals": Bad(
        "name: digits", "name: Digits", "metadata.name", '"Digits" is not a name', "lower-case"
    ),
    "name too long": Bad(
        "name: digits", f"name: {'d' * 46}", "metadata.name", "is not a name", "at most 45"
    ),
    # The pod template
    "no template": Bad(
        GOOD[GOOD.index("  template:"):], "", "spec.template", "is missing", "name a runtime",
    ),
    "no trainer": Bad(
        "name: trainer", "name: trainr", "spec.template.spec.containers",
        "has no container named trainer (found: trainr)", "rename container trainr to trainer",
    ),
    "no command": Bad(
        "          command: [python, train.py]\n", "", f"{TRAINER}.command", "is missing",
        'set command, such as ["python", "train.py"]',
    ),
    "command misspelt": Bad(
        "command:", "comand:", f"{TRAINER}.command", "is missing", "did you mean command"
    ),
    "command empty": Bad(
        "[python, train.py]", '[""]', f"{TRAINER}.command", "is empty", "set command, such as"
    ),
    "command that starts ranks": Bad(
        "[python, train.py]", "[torchrun, --nproc-per-node=2, train.py]", f"{TRAINER}.command",
        '"torchrun" starts ranks itself', "name the script itself",
    ),
    "path of a command that starts ranks": Bad(
        "[python, train.py]", "[/opt/venv/bin/mpirun, python, train.py]", f"{TRAINER}.command",
        '"mpirun" starts ranks itself', "name the script itself",
    ),
    "two trainers": Bad(
        "        - name: trainer\n",
        "        - {name: trainer, command: [a]}\n        - name: trainer\n",
        "spec.template.spec.containers[1].name", '"trainer" is the name of two', "its own name",
    ),
    "own variable": Bad(
        "name: OMP_NUM_THREADS", "name: PACELINE_SLOT", f"{TRAINER}.env[0].name",
        '"PACELINE_SLOT" is set in container trainer', "remove it from env",
    ),
    "torch variable": Bad(
        "name: OMP_NUM_THREADS", "name: MASTER_ADDR", f"{TRAINER}.env[0].name",
        '"MASTER_ADDR" is set in container trainer', "remove it from env",
    ),
    "pod restarts itself": Bad(
        "    spec:\n", "    spec:\n      restartPolicy: Always\n",
        "spec.template.spec.restartPolicy", '"Always" is not Never', "remove it",
    ),
    "label of Paceline": Bad(
        "    spec:\n", "    metadata: {labels: {paceline.dev/slot: a}}\n    spec:\n",
        "spec.template.metadata.labels", '"paceline.dev/slot" begins with', "prefix of your own",
    ),
    "note of Paceline": Bad(
        "    spec:\n", "    metadata: {annotations: {paceline.dev/cause: a}}\n    spec:\n",
        "spec.template.metadata.annotations", '"paceline.dev/cause" begins with',
        "prefix of your own",
    ),
    "no containers": Bad(
        GOOD[GOOD.index("      containers:") :], "      containers: []\n",
        "spec.template.spec.containers", "is empty", "give a value",
    ),
}  # fmt: skip
