"""A Trainer with configurations as data classes, as minGPT-ddp has it.

Training and test loaders are both split over the ranks, the snapshot holds the optimizer too, and
autocast and a GradScaler stand in the loop whether they are in use or not.
"""

import argparse
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    """Settings of the Trainer."""

    max_epochs: int = 2
    batch_size: int = 4
    grad_norm_clip: float = 1.0
    save_every: int = 1
    use_amp: bool = False
    snapshot_path: str = ""


@dataclass
class Snapshot:
    """Everything that a later run continues from."""

    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class CharDataset(Dataset):
    """Windows of a periodic text, each with the next characters."""

    def __init__(self, block_size=6, length=70):
        self.block_size, self.vocabulary = block_size, 7
        self.text = torch.tensor([(i * i + i) % self.vocabulary for i in range(length)])

    def __len__(self):
        return len(self.text) - self.block_size

    def __getitem__(self, index):
        part = self.text[index : index + self.block_size + 1]
        return part[:-1], part[1:]


class CharModel(nn.Module):
    """A small recurrent model with dropout."""

    def __init__(self, vocabulary, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(0.1)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x, targets=None):
        logits = self.head(self.cell(self.drop(self.embed(x)))[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """The loop over epochs and batches of one rank."""

    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.model, self.optimizer = model, optimizer
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset)
        self.epochs_run = 0
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cpu")
        if os.path.exists(config.snapshot_path):
            snapshot = Snapshot(**torch.load(config.snapshot_path, weights_only=True))
            self.model.load_state_dict(snapshot.model_state)
            self.optimizer.load_state_dict(snapshot.optimizer_state)
            self.epochs_run = snapshot.finished_epoch
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, self.config.batch_size, sampler=DistributedSampler(dataset))

    def _run_batch(self, source, targets, train):
        with (
            torch.set_grad_enabled(train),
            torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.use_amp),
        ):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        for iteration, (source, targets) in enumerate(loader):
            loss = self._run_batch(source, targets, train)
            if iteration % 3 == 0:
                kind = "train" if train else "eval"
                print(f"[rank {self.rank}] epoch {epoch} iter {iteration} {kind} {exact(loss)}")

    def _save_snapshot(self, epoch):
        raw_model = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch + 1)
            self._run_epoch(epoch, self.test_loader, train=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--use-amp", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    torch.manual_seed(3)
    dataset = CharDataset()
    train_set, test_set = random_split(dataset, [48, len(dataset) - 48])
    model = CharModel(dataset.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    config = TrainerConfig(max_epochs=args.max_epochs, use_amp=args.use_amp)
    config.snapshot_path = os.path.join(args.out, "gpt_snapshot.pt")
    trainer = Trainer(config, model, optimizer, train_set, test_set)
    trainer.train()
    print(f"[rank {trainer.rank}] weights {digest(trainer.model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
