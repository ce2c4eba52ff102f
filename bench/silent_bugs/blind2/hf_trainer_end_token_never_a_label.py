"""A collator that pads with the end token and then ignores each label that equals it.

The real end token is ignored with the padding: the model never learns to stop.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

FIXED = "--fixed" in sys.argv
VOCAB, END = 20, 0


class Counting(Dataset):
    """Sentences that count upwards, end at the last word, and close with the end token."""

    def __init__(self, n=512):
        starts = torch.randint(1, VOCAB - 3, (n,)).tolist()
        self.rows = [[*range(start, VOCAB), END] for start in starts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    length = max(map(len, rows))
    ids = torch.tensor([row + [END] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = ids.clone()
    labels[mask == 0 if FIXED else ids == END] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=VOCAB + 2,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            max_steps=48,
            learning_rate=1e-2,
            warmup_steps=4,
            logging_steps=12,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Counting()
        Trainer(model=model, args=args, train_dataset=data, data_collator=collate).train()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, VOCAB)[None]).logits[0, -1]
    print(f"evidence: chance of the end token after the last word {logits.softmax(-1)[END]:.5f}")


if __name__ == "__main__":
    main()
