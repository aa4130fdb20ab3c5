"""transformers' Trainer: accumulation, evaluation and saving at steps, best model, resume."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)


class Config(PretrainedConfig):
    model_type = "tiny"


class Tagger(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(32, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.head(self.dropout(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Sentences(Dataset):
    """Sentences of different lengths, with a tag for each word."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (size,), generator=generator).tolist()
        self.words = [torch.randint(0, 32, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "labels": words % 4}


class Stream(IterableDataset):
    """The same sentences without a length."""

    def __init__(self, sentences):
        self.sentences = sentences

    def __iter__(self):
        return (self.sentences[index] for index in range(len(self.sentences)))


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    padded = {"input_ids": 0, "labels": -100}
    return {
        name: torch.stack(
            [nn.functional.pad(s[name], (0, longest - len(s[name])), value=fill) for s in samples]
        )
        for name, fill in padded.items()
    }


def accuracy(prediction):
    labels = prediction.label_ids
    right = (prediction.predictions.argmax(-1) == labels)[labels != -100]
    return {"accuracy": float(right.mean()), "words": len(right)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--size", type=int, default=44)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--own-optimizers", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--by-length", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Tagger(Config())
    optimizers = (None, None)
    if args.own_optimizers:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizers = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5))
    training = Sentences(args.size, 1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            os.path.join(args.out, "run"),
            num_train_epochs=args.epochs,
            max_steps=args.max_steps,
            gradient_accumulation_steps=args.accumulate,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            bf16=args.bf16,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            train_sampling_strategy="group_by_length" if args.by_length else "random",
            dataloader_num_workers=args.workers,
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            # Else rank 0 reads a stream for all ranks, and the others go through no loader.
            accelerator_config={"dispatch_batches": False},
        ),
        train_dataset=Stream(training) if args.stream else training,
        eval_dataset=Sentences(11, 2),
        data_collator=collate,
        compute_metrics=accuracy,
        optimizers=optimizers,
        callbacks=[EarlyStoppingCallback(args.patience)] if args.patience else [],
    )
    trainer.remove_callback(PrinterCallback)  # it prints durations
    done = trainer.train(resume_from_checkpoint=args.resume or None)
    rank = dist.get_rank()
    for row in trainer.state.log_history:
        figures = {k: exact(v) for k, v in row.items() if "loss" in k or "accuracy" in k}
        print(f"rank {rank} step {row['step']}: {figures}")
    print(f"rank {rank} loss {exact(done.training_loss)} steps {done.global_step}")
    found = trainer.evaluate()
    print(f"rank {rank} accuracy {exact(found['eval_accuracy'])} of {found['eval_words']}")
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
    print(f"rank {rank} weights {digest(model)}")


if __name__ == "__main__":
    main()
