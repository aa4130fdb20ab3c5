"""A script that trains a little, then hangs where and how a test configures it."""

from __future__ import annotations

LOOP = "while True: pass"
READ = "os.read(os.pipe()[0], 1)"

_SCRIPT = """\
import os, time
RANK, ATTEMPT = map(int, os.environ["PACELINE_MEMBER"].replace("#", ".").split(".")[::2])
if BEFORE:
    print("still importing", flush=True)
    time.sleep(600)
import torch
import paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(data, batch_size=4, seed=0)
for epoch in loader.epochs(2):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if INSIDE:
            HOW
if BEHIND:
    print("stuck behind the loop", flush=True)
    HOW
"""
LINE_INSIDE = _SCRIPT[: _SCRIPT.index("HOW")].count("\n") + 1


def stuck_script(
    how: str = "pass", *, before: str = "False", inside: str = "False", behind: str = "False"
) -> str:
    """Return the script.

    Args:
        how: The statement that hangs, inside or behind the loop.
        before: Condition, of RANK and ATTEMPT, of hanging before `pl.init()`.
        inside: Condition of hanging after a step; may read `epoch`.
        behind: Condition of hanging after the loop.
    """
    places = {"BEFORE": before, "INSIDE": inside, "BEHIND": behind, "HOW": how}
    text = _SCRIPT
    for place, meant in places.items():
        text = text.replace(place, meant)
    return text
