"""accelerate without a Trainer: prepared scheduler, clipping, gathered metrics, saved states."""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from figures import digest, exact
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--checkpointing-steps", type=int, default=5)
    parser.add_argument("--max-train-steps", type=int, default=1000)
    parser.add_argument("--resume", default="")
    parser.add_argument("--split-batches", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        project_config=ProjectConfiguration(args.out, automatic_checkpoint_naming=False),
    )
    set_seed(17)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = DataLoader(data(52, 1), batch_size=4, shuffle=True)
    validation = DataLoader(data(19, 2), batch_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    accelerator.register_for_checkpointing(scheduler)
    rank = accelerator.process_index
    done, first, skip = 0, 0, 0
    if args.resume:
        accelerator.load_state(os.path.join(args.out, args.resume))
        done = int(args.resume.removeprefix("step_"))
        first, steps = divmod(done, math.ceil(len(training) / args.accumulate))
        skip = steps * args.accumulate
    for epoch in range(first, args.epochs):
        model.train()
        total = 0
        if skip:
            active = accelerator.skip_first_batches(training, skip)
            skip = 0
        else:
            active = training
        for x, y in active:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                total += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % args.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.out, f"step_{done}"))
            if done >= args.max_train_steps:
                break
        model.eval()
        guesses, truths = [], []
        for x, y in validation:
            with torch.no_grad():
                guess = model(x).argmax(1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            guesses.append(guess)
            truths.append(y)
        guesses, truths = torch.cat(guesses), torch.cat(truths)
        seen = accelerator.gather_for_metrics(
            [f"rank {rank} epoch {epoch}"], use_gather_object=True
        )
        mean = accelerator.reduce(total, "mean")
        print(
            f"rank {rank} epoch {epoch}: loss {exact(mean)} right "
            f"{int((guesses == truths).sum())} of {len(truths)} rate "
            f"{exact(scheduler.get_last_lr()[0])} from {len(seen)}"
        )
        longest = accelerator.pad_across_processes(guesses[: rank + 1], dim=0)
        print(f"rank {rank} padded {tuple(longest.shape)}")
        if done >= args.max_train_steps:
            break
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        accelerator.save(plain.state_dict(), os.path.join(args.out, "model.pt"))
    accelerator.wait_for_everyone()
    print(f"rank {rank} weights {digest(plain)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
