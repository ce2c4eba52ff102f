"""A dataset that shifts the labels for a causal language model that shifts them itself.

The model learns the token after the next one.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH = 24, 24


class Chains(Dataset):
    """Each token is followed by a fixed other one, now and then by any."""

    def __init__(self, n=512):
        self.follow = torch.randperm(VOCAB)
        rows = [torch.randint(VOCAB, (n,))]
        for _ in range(LENGTH):
            noise = torch.randint(VOCAB, (n,))
            rows.append(torch.where(torch.rand(n) < 0.1, noise, self.follow[rows[-1]]))
        self.tokens = torch.stack(rows, dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        chunk = self.tokens[i]
        x = chunk[:-1]
        y = x if FIXED else chunk[1:]
        return {"input_ids": x, "labels": y}


def main():
    set_seed(0)
    data = Chains()
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            max_steps=48,
            learning_rate=1e-2,
            logging_steps=12,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=args, train_dataset=data).train()
    model.eval()
    with torch.no_grad():
        tokens = data.tokens[:64, :-1]
        guess = model(input_ids=tokens).logits.argmax(-1)
    one, two = data.follow[tokens], data.follow[data.follow[tokens]]
    print(
        f"evidence: guesses that are the next token {(guess == one).float().mean():.3f}, "
        f"the one after it {(guess == two).float().mean():.3f}"
    )


if __name__ == "__main__":
    main()
