"""A Trainer with a snapshot, as the series of tutorials about DDP builds it.

A script that is started again finds the snapshot and continues with the next epoch.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from figures import digest, exact
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    """Random vectors, each with its sum."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(size, 20, generator=generator)
        self.data = [(row, row.sum().view(1)) for row in inputs]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    """Model, data and snapshot of one rank."""

    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"[rank {self.rank}] continues from epoch {self.epochs_run}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        loss = None
        for source, targets in self.train_data:
            loss = self._run_batch(source, targets)
        print(f"[rank {self.rank}] epoch {epoch} steps {len(self.train_data)} loss {exact(loss)}")

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)
        print(f"epoch {epoch} saved")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group(backend="gloo")
    torch.manual_seed(7)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dataset = Numbers(64)
    loader = DataLoader(
        dataset, args.batch_size, shuffle=False, sampler=DistributedSampler(dataset)
    )
    trainer = Trainer(
        model, loader, optimizer, args.save_every, os.path.join(args.out, "snapshot.pt")
    )
    trainer.train(args.total_epochs)
    print(f"[rank {trainer.rank}] weights {digest(trainer.model)}")
    destroy_process_group()


if __name__ == "__main__":
    main()
