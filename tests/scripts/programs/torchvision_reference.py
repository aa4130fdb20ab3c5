"""A classifier as torchvision's reference scripts train it.

A linear warm-up and a cosine per epoch, an average of the weights, metrics that are synchronized
between processes, and SyncBatchNorm where there is a device, since it has no CPU kernel.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset


class ExponentialMovingAverage(AveragedModel):
    """Average of the weights that forgets at a given rate; buffers are averaged too."""

    def __init__(self, model, decay):
        def average(old, new, _):
            return decay * old + (1 - decay) * new

        super().__init__(model, avg_fn=average, use_buffers=True)


class SmoothedValue:
    """Sum and count of one figure."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize_between_processes(self):
        both = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.count, self.total = int(both[0].item()), both[1].item()

    @property
    def global_avg(self):
        return self.total / self.count


def init_distributed_mode(args):
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.exit("start this script with torchrun")
    args.rank, args.gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method="env://", world_size=args.world_size, rank=args.rank
    )
    dist.barrier()


def train_one_epoch(model, criterion, optimizer, loader, epoch, args, model_ema):
    model.train()
    loss_meter = SmoothedValue()
    for i, (image, target) in enumerate(loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if i % args.ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # the warm-up copies the weights
        loss_meter.update(loss.item(), len(target))
    print(f"epoch {epoch} lr {exact(optimizer.param_groups[0]['lr'])} {exact(loss_meter.total)}")


def evaluate(model, criterion, loader, suffix):
    model.eval()
    loss_meter, right = SmoothedValue(), SmoothedValue()
    samples = 0
    with torch.inference_mode():
        for image, target in loader:
            output = model(image)
            loss_meter.update(criterion(output, target).item())
            right.update((output.argmax(1) == target).float().mean().item(), len(target))
            samples += len(target)
    everywhere = torch.tensor(samples)
    dist.barrier()
    dist.all_reduce(everywhere)
    loss_meter.synchronize_between_processes()
    right.synchronize_between_processes()
    print(f"Test{suffix}: {everywhere.item()} {exact(right.global_avg)}")
    return loss_meter.global_avg


def save_on_master(args, *given):
    if args.rank == 0:
        torch.save(*given)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr-warmup-epochs", type=int, default=2)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--ema-steps", type=int, default=2)
    parser.add_argument("--sync-bn", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed_mode(args)
    torch.manual_seed(21)
    x = torch.randn(96, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    train_set, test_set = TensorDataset(x[:72], y[:72]), TensorDataset(x[72:], y[72:])
    train_sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 6, sampler=train_sampler, drop_last=True)
    test_loader = DataLoader(test_set, 6, sampler=DistributedSampler(test_set, shuffle=False))
    whole_loader = DataLoader(test_set, 6, sampler=SequentialSampler(test_set))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    if args.sync_bn and torch.cuda.is_available():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    warm_up = LinearLR(optimizer, start_factor=0.01, total_iters=args.lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs, eta_min=1e-4)
    scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[args.lr_warmup_epochs])
    model_without_ddp = model
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    adjust = args.world_size * 6 * args.ema_steps / args.epochs
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=1.0 - min(1.0, 0.02 * adjust))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, loader, epoch, args, model_ema)
        scheduler.step()
        evaluate(model, criterion, test_loader, "")
        evaluate(model_ema, criterion, whole_loader, " EMA")
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "model_ema": model_ema.state_dict(),
            "epoch": epoch,
        }
        save_on_master(args, checkpoint, os.path.join(args.out, f"model_{epoch}.pth"))
        save_on_master(args, checkpoint, os.path.join(args.out, "checkpoint.pth"))
    # Each rank keeps an average of its own, also of its own statistics of the batches.
    print(f"rank {args.rank} weights {digest(*model.parameters(), *model_ema.module.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
