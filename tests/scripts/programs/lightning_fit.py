"""Lightning's Trainer: scheduler, validation in fit(), checkpoints, early stopping, last one."""

import argparse
import os
import warnings

import lightning
import torch
import torch.distributed as dist
from figures import digest, exact
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.history = []

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.history.append(loss.detach())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def on_train_epoch_end(self):
        if not self.automatic_optimization:
            self.lr_schedulers().step()

    def validation_step(self, batch):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def on_validation_epoch_end(self):
        everywhere = self.all_gather(torch.stack([p.norm() for p in self.parameters()]).detach())
        self.print(f"gathered {tuple(everywhere.shape)}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Stream(IterableDataset):
    """Every W-th sample."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for index in range(dist.get_rank(), len(self.samples), dist.get_world_size()):
            yield self.samples[index]


def data(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--ckpt-path", default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lightning.seed_everything(23)
    net = Net(args.manual)
    training = data(72, 1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        limit_train_batches=args.limit or 1.0,
        precision=args.precision,
        accumulate_grad_batches=1 if args.manual else 2,
        gradient_clip_val=None if args.manual else 0.5,
        callbacks=[
            ModelCheckpoint(
                os.path.join(args.out, "saved"), monitor="val_loss", save_last=True, save_top_k=1
            ),
            EarlyStopping("val_loss", patience=3),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=args.out,
    )
    loader = DataLoader(
        Stream(training) if args.stream else training, batch_size=4, shuffle=not args.stream
    )
    trainer.fit(net, loader, DataLoader(data(21, 2), batch_size=4), ckpt_path=args.ckpt_path)
    rank = trainer.global_rank
    print(f"rank {rank} losses {exact(sum(net.history))} of {len(net.history)}")
    metrics = {name: exact(value) for name, value in sorted(trainer.callback_metrics.items())}
    print(f"rank {rank} metrics {metrics}")
    print(f"rank {rank} steps {trainer.global_step} epoch {trainer.current_epoch}")
    if trainer.is_global_zero:
        torch.save(net.state_dict(), os.path.join(args.out, "model.pt"))
    # The statistics of a BatchNorm are each rank's own until they are sent.
    print(f"rank {rank} weights {digest(*net.parameters())}")


if __name__ == "__main__":
    main()
