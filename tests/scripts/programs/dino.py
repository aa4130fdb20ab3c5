"""Self-distillation as DINO does it.

A teacher that is not wrapped follows the student, a centre in the loss is reduced in each step,
rate, decay and momentum are arrays, and the gradients of the last layer are cancelled for an epoch.
"""

import argparse
import json
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from figures import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VIEWS, GLOBAL_VIEWS = 4, 2


class Network(nn.Module):
    """A perceptron with a last layer whose weights are normalized."""

    def __init__(self, out=10):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        last = nn.Linear(4, out, bias=False)
        self.last_layer = nn.utils.parametrizations.weight_norm(last)

    def forward(self, crops):
        return self.last_layer(nn.functional.normalize(self.body(torch.cat(crops)), dim=-1))


class DINOLoss(nn.Module):
    """A cross-entropy of student and teacher, whose outputs are centred."""

    def __init__(self, out=10):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student_output, teacher_output):
        student = (student_output / 0.1).chunk(VIEWS)
        teacher = nn.functional.softmax((teacher_output - self.center) / 0.04, dim=-1)
        total, terms = 0, 0
        for i, one in enumerate(teacher.detach().chunk(GLOBAL_VIEWS)):
            for j, other in enumerate(student):
                if i != j:
                    term = torch.sum(-one * nn.functional.log_softmax(other, dim=-1), dim=-1)
                    total += term.mean()
                    terms += 1
        self.update_center(teacher_output)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(center)
        center = center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * 0.9 + center * 0.1


def cosine(first, last, steps):
    return last + 0.5 * (first - last) * (1 + np.cos(np.pi * np.arange(steps) / steps))


def clip_gradients(model, clip):
    for parameter in model.parameters():
        if parameter.grad is not None:
            factor = clip / (parameter.grad.data.norm(2) + 1e-6)
            if factor < 1:
                parameter.grad.data.mul_(factor)


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    student, teacher = Network(), Network()
    student = DDP(student)
    teacher.load_state_dict(student.module.state_dict())
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    dino_loss = DINOLoss()
    named = list(student.named_parameters())
    regularized = [p for name, p in named if not name.endswith(".bias")]
    others = [p for name, p in named if name.endswith(".bias")]
    optimizer = torch.optim.AdamW(
        [{"params": regularized}, {"params": others, "weight_decay": 0.0}]
    )
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(*[torch.randn(48, 6, generator=generator) for _ in range(VIEWS)])
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=4, drop_last=True)
    steps = 3 * len(loader)
    rates, decays = cosine(1e-2, 1e-4, steps), cosine(0.04, 0.4, steps)
    momenta = cosine(0.9, 1, steps)
    path, first = os.path.join(args.out, "checkpoint.pth"), 0
    if os.path.exists(path):
        kept = torch.load(path)
        student.load_state_dict(kept["student"])
        teacher.load_state_dict(kept["teacher"])
        optimizer.load_state_dict(kept["optimizer"])
        dino_loss.load_state_dict(kept["dino_loss"])
        first = kept["epoch"]
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for it, crops in enumerate(loader):
            it = len(loader) * epoch + it
            for i, group in enumerate(optimizer.param_groups):
                group["lr"] = rates[it]
                if i == 0:
                    group["weight_decay"] = decays[it]
            loss = dino_loss(student(crops), teacher(crops[:GLOBAL_VIEWS]))
            if not math.isfinite(loss.item()):
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(student, 3.0)
            if epoch < 1:
                for name, parameter in student.named_parameters():
                    if "last_layer" in name:
                        parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                pairs = zip(student.module.parameters(), teacher.parameters(), strict=True)
                for one, other in pairs:
                    other.data.mul_(momenta[it]).add_((1 - momenta[it]) * one.detach().data)
        mean = torch.tensor(loss.item())
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            state = {
                "student": student.state_dict(),
                "teacher": teacher.state_dict(),
                "optimizer": optimizer.state_dict(),
                "dino_loss": dino_loss.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(state, path)
            with open(os.path.join(args.out, "log.txt"), "a") as file:
                file.write(json.dumps({"epoch": epoch, "loss": mean.item()}) + "\n")
    print(f"rank {dist.get_rank()} weights {digest(student, teacher, dino_loss.center)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
