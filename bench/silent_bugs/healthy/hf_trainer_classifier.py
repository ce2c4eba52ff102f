"""Hugging Face Trainer: a tiny BERT from scratch, evaluation per epoch, warm-up from lr 0."""

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB, PAD = 40, 0


class Sentiment(Dataset):
    """Tokens below 10 are good, those above 30 are bad; the label says which prevail."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(n):
            length = int(torch.randint(6, 16, (), generator=generator))
            ids = torch.randint(1, VOCAB, (length,), generator=generator)
            label = int((ids < 10).sum() > (ids > 30).sum())
            self.samples.append({"input_ids": ids.tolist(), "label": label})

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate(samples):
    longest = max(len(s["input_ids"]) for s in samples)
    rows = [s["input_ids"] + [PAD] * (longest - len(s["input_ids"])) for s in samples]
    ids = torch.tensor(rows)
    labels = torch.tensor([s["label"] for s in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def metrics(prediction):
    guess = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((guess == prediction.label_ids).mean())}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=20,
        num_labels=2,
        initializer_range=0.1,
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            num_train_epochs=2,
            learning_rate=3e-3,
            warmup_steps=8,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Sentiment(800, 1),
            eval_dataset=Sentiment(200, 2),
            data_collator=collate,
            compute_metrics=metrics,
        )
        trainer.train()
        print(trainer.evaluate())


if __name__ == "__main__":
    main()
