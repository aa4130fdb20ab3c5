"""A character model as nanoGPT trains it.

Each rank draws its own batches from its seed. The rate is set by hand, gradients are accumulated
through `require_backward_grad_sync`, rank 0 alone evaluates, and the best checkpoint is resumed.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--init-from", default="scratch", choices=["scratch", "resume"])
parser.add_argument("--max-iters", type=int, default=8)
parser.add_argument("--grad-clip", type=float, default=0.5)
parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
args = parser.parse_args()

eval_interval, eval_iters, batch_size, block_size, vocabulary = 4, 3, 4, 8, 16
learning_rate, min_lr, warmup_iters, lr_decay_iters = 3e-3, 3e-4, 3, 16
gradient_accumulation_steps = 8

torch.set_num_threads(1)
ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_rank, ddp_world_size = True, 0, 0, 1
torch.manual_seed(1337 + seed_offset)
text = torch.randint(vocabulary, (600,), generator=torch.Generator().manual_seed(0)).cumsum(0)
text %= vocabulary
splits = {"train": text[:500], "val": text[500:]}


class Block(nn.Module):
    """One layer of attention and one of perceptrons."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A model whose output layer shares the weights of its embedding."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block_size, width)
        self.block = Block(width, heads=2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        hidden = self.block(self.tokens(x) + self.places.weight[: x.shape[1]])
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.view(-1, vocabulary), y.view(-1))

    def configure_optimizers(self):
        """Return AdamW with weight decay for matrices only."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_batch(split):
    data = splits[split]
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[i : i + block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    means = {}
    for split in ("train", "val"):
        losses = torch.stack([model(*get_batch(split))[1] for _ in range(eval_iters)])
        means[split] = losses.mean().item()
    model.train()
    return means


def get_lr(iteration):
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    ratio = min(1.0, (iteration - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


iter_num, best_val_loss = 0, 1e9
model = GPT()
optimizer = model.configure_optimizers()
scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "float16", init_scale=256.0)
if args.init_from == "resume":
    checkpoint = torch.load(os.path.join(args.out, "ckpt.pt"), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

x, y = get_batch("train")
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {exact(losses['train'])} val {exact(losses['val'])}")
        if losses["val"] < best_val_loss and iter_num > 0:
            best_val_loss = losses["val"]
            state = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
            }
            torch.save(state, os.path.join(args.out, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if args.grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {exact(loss * gradient_accumulation_steps)}, lr {exact(lr)}")
    iter_num += 1
    if iter_num > args.max_iters:
        break
print(f"rank {ddp_rank} weights {digest(raw_model)}")
if ddp:
    dist.destroy_process_group()
