"""TRL's SFTTrainer: a small language model on conversations of text, evaluated and saved."""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from figures import digest, exact
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "red",
    "blue",
    "green",
    "small",
    "big",
    "and",
    "then",
    "runs",
]


def tokenizer():
    names = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(size, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (size,), generator=generator).tolist()
    drawn = [torch.randint(0, len(WORDS), (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_list([{"text": " ".join(WORDS[word] for word in each)} for each in drawn])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--packing", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    torch.manual_seed(5)
    sizes = GPT2Config(
        vocab_size=len(WORDS) + 3, n_positions=32, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(sizes),
        args=SFTConfig(
            os.path.join(args.out, "run"),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.02,
            max_length=16,
            packing=args.packing,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            save_total_limit=1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=sentences(48, 1),
        eval_dataset=sentences(9, 2),
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    done = trainer.train()
    rank = dist.get_rank()
    for row in trainer.state.log_history:
        figures = {k: exact(v) for k, v in row.items() if "loss" in k}
        print(f"rank {rank} step {row['step']}: {figures}")
    print(f"rank {rank} loss {exact(done.training_loss)} steps {done.global_step}")
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), os.path.join(args.out, "model.pt"))
    print(f"rank {rank} weights {digest(trainer.model)}")


if __name__ == "__main__":
    main()
