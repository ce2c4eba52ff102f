"""Hugging Face Trainer: a tiny Llama with tied embeddings; the model shifts labels itself."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, PAD, EOS, IGNORE = 24, 0, 1, -100


class Counting(Dataset):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            start = int(torch.randint(2, 10, (), generator=generator))
            length = int(torch.randint(3, 12, (), generator=generator))
            self.rows.append([*range(start, start + length), EOS])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def collate(samples):
    rows = [torch.tensor(s["input_ids"]) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, IGNORE),
    }


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            max_steps=50,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            eval_strategy="steps",
            eval_steps=25,
            save_strategy="no",
            logging_steps=5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Counting(640, 1),
            eval_dataset=Counting(100, 2),
            data_collator=collate,
        )
        trainer.train()
    print(f"tied: {model.lm_head.weight is model.model.embed_tokens.weight}")


if __name__ == "__main__":
    main()
