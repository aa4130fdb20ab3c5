"""Scripts of accelerate, transformers and Lightning in real elastic jobs.

Each is a plain script of its framework in which the lines marked `# job` were changed for Paceline.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline, joined

pytestmark = pytest.mark.processes

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 3
  collective: {backend: gloo, mode: Quorum, quorum: 2, maxAge: 0}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, script.py]}]
"""
COMMON = """\
import hashlib, time
import torch
import paceline as pl

torch.manual_seed(0)
torch.set_num_threads(1)
EPOCHS = 8
x = torch.randn(480, 8, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
steps = 0

def wait_for_the_others():
    global steps
    steps += 1
    if steps > 60 and pl.size() < 4:
        time.sleep(0.25)  # the job shall not end before all are there

def tell(net):
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    loss = torch.nn.functional.mse_loss(net.layers(x), y).item()
    print("WEIGHTS", hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest())
    print("LOSS", f"{loss:.4f}", "PUBLISHES" if pl.is_publisher() else "", flush=True)

def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
"""
ACCELERATE = (
    COMMON
    + """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from paceline.frameworks.accelerate import prepare  # job

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()
    def forward(self, x):
        return self.layers(x)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
model, optimizer, loader = prepare(accelerator, net, optimizer, loader, epochs=EPOCHS)  # job
for epoch in range(EPOCHS):
    for features, labels in loader:
        wait_for_the_others()
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
tell(accelerator.unwrap_model(model))
"""
)
TRANSFORMERS = (
    COMMON
    + """
import pathlib
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from paceline.frameworks.transformers import Trainer  # job

class Net(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = layers()
        self.post_init()
    def forward(self, x, labels=None):
        wait_for_the_others()
        out = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

torch.manual_seed(0)
net = Net(PretrainedConfig())
data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
args = TrainingArguments(
    "out", num_train_epochs=EPOCHS, per_device_train_batch_size=4, learning_rate=0.01,
    use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=20,
    save_strategy="steps", save_steps=40, eval_strategy="steps", eval_steps=40,
    warmup_steps=10, lr_scheduler_type="cosine", remove_unused_columns=False,
)
trainer = Trainer(model=net, args=args, train_dataset=data, eval_dataset=data[:40])
trainer.train()
trainer.save_model("final")
tell(net)
"""
)
LIGHTNING = (
    COMMON
    + """
import lightning
from torch.utils.data import DataLoader, TensorDataset
from paceline.frameworks.lightning import JobStrategy  # job

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers()
    def training_step(self, batch, batch_idx):
        wait_for_the_others()
        features, labels = batch
        loss = torch.nn.functional.mse_loss(self.layers(features), labels)
        pl.log("loss", loss.detach(), weight=len(features))
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

net = Net()
trainer = lightning.Trainer(
    strategy=JobStrategy("cpu"),  # job
    accelerator="cpu", max_epochs=EPOCHS, gradient_clip_val=5.0, accumulate_grad_batches=2,
    enable_progress_bar=False, enable_model_summary=False, logger=False, default_root_dir="out",
)
trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
tell(net)
"""
)
SCRIPTS = {"accelerate": ACCELERATE, "transformers": TRANSFORMERS, "lightning": LIGHTNING}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_framework_script_survives_a_killed_rank_and_a_joining_one(
    tmp_path: Path, name: str
) -> None:
    script = SCRIPTS[name]
    assert 1 <= script.count("# job") <= 5
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "script.py").write_text(script)
    faults = ("--inject", "kill:rank=1,at=round:50", "--inject", "join:at=round:50")
    code, said = forked_paceline(tmp_path, "run", "job.yaml", *faults, HF_HUB_OFFLINE="1")
    assert code == 0, said
    hashes = re.findall(r"WEIGHTS (\w+)", said)
    assert len(hashes) == 4, said
    assert len(set(hashes)) == 1, said
    assert joined(said) == {"1.0#1", "3.0#0"}
    assert "epochs               8 with each sample applied exactly once" in said
    assert "samples dropped      0" in said
    losses = [float(loss) for loss in re.findall(r"LOSS ([\d.]+)", said)]
    assert max(losses) < 1.0, said  # it is 8 before training
    assert said.count("PUBLISHES") == 1
    if name == "transformers":
        assert "eval_loss" in said
        assert list(tmp_path.glob("out/checkpoint-*/model.safetensors"))
        assert (tmp_path / "final" / "model.safetensors").exists()
