"""An exec plugin for tests: it prints the credential in a file and records each call."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API = "client.authentication.k8s.io/v1"
PROGRAM = """#!{python} -SE
import json, os, pathlib, sys, time
folder = pathlib.Path({folder!r})
with (folder / "asked").open("a") as asked:
    asked.write(os.environ["KUBERNETES_EXEC_INFO"] + "\\n")
told = json.loads((folder / "answer").read_text())
time.sleep(told.get("silent_s", 0))
sys.stderr.write(told.get("said", ""))
status = told["status"]
if "life_s" in told:
    at = time.gmtime(time.time() + told["life_s"])
    status["expirationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", at)
print(json.dumps({{"apiVersion": {api!r}, "kind": "ExecCredential", "status": status}}))
sys.exit(told.get("code", 0))
"""


@dataclass(frozen=True)
class Plugin:
    """The plugin's program, its answer and its record, in one folder."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Plugin:
        """Install the program in a folder, which is made if needed."""
        folder.mkdir(exist_ok=True)
        program = folder / "who-am-i"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder), api=API))
        program.chmod(0o755)
        return cls(folder)

    def hands_out(self, status: dict[str, Any], **more: Any) -> None:
        """Set the status for later calls; `life_s` is the lifetime that the credential claims."""
        new = self.folder / "answer.new"
        new.write_text(json.dumps({"status": status, **more}))
        new.replace(self.folder / "answer")

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Request that each call received, in order."""
        file = self.folder / "asked"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def user(self, **more: Any) -> dict[str, Any]:
        """Return the user entry of a kubeconfig."""
        command = str(self.folder / "who-am-i")
        return {"exec": {"apiVersion": API, "command": command, **more}}
