"""Stand-ins for the models and data sets that the tests of TRL download.

    python -m attached_suites.stand_ins <folder>          # makes the models, in a cache of the Hub
    HF_HUB_CACHE=<folder> HF_HUB_OFFLINE=1 python -m pytest -p attached_suites.stand_ins …

The models are as small as those of the tests, with random weights and one tokenizer; the data sets
are made of the lines of `import this`. As a pytest plugin, this module replaces
`datasets.load_dataset`, and training runs on the CPU.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

OWNER = "trl-internal-testing"
COMMIT = "0" * 40
MODELS = (
    "tiny-Qwen2ForCausalLM-2.5",
    "small-Qwen2ForCausalLM-2.5",
    "tiny-Qwen2ForSequenceClassification-2.5",
    "tiny-Qwen3ForCausalLM",
    "tiny-Qwen3ForCausalLM-Instruct-2507",
    "small-Qwen3ForCausalLM",
    "tiny-Qwen3ForSequenceClassification",
    "tiny-Qwen3MoeForCausalLM",
    "tiny-Qwen3MoeForSequenceClassification",
    "tiny-LlamaForCausalLM-3.2",
    "tiny-LlamaForCausalLM-3.1",
    "tiny-LlamaForCausalLM-3",
    "tiny-LlamaForSequenceClassification-3.2",
    "tiny-MistralForCausalLM-0.1",
    "tiny-MistralForCausalLM-0.2",
    "tiny-GPTNeoXForCausalLM",
    "tiny-GptNeoXForSequenceClassification",
    "tiny-GPT2LMHeadModel",
    "tiny-OPTForCausalLM",
    "tiny-BloomForCausalLM",
    "tiny-GemmaForCausalLM",
    "tiny-Gemma2ForCausalLM",
    "tiny-CohereForCausalLM",
    "tiny-Cohere2ForCausalLM",
    "tiny-Phi3ForCausalLM-3",
    "tiny-Phi3ForCausalLM-3.5",
    "tiny-FalconMambaForCausalLM",
    "tiny-GptOssForCausalLM",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def zen_lines() -> list[str]:
    """Return the lines of `import this`."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [line for line in codecs.decode(this.s, "rot13").splitlines() if line][1:]


# -- data sets ------------------------------------------------------------------------------------


def make_dataset(config: str) -> Any:
    """Return a data set with the columns that its name says, in two splits."""
    from datasets import Dataset, DatasetDict

    form, _, kind = config.partition("_")
    rows = []
    for i, line in enumerate(zen_lines()):
        words = line.split()
        half = (len(words) + 1) // 2
        first, second, other = " ".join(words[:half]), " " + " ".join(words[half:]), " no"
        if form == "conversational":
            rows.append(_chat_row(kind, first, second, other, i))
        else:
            rows.append(_text_row(kind, line, first, second, other, i))
    data = Dataset.from_list(rows)
    return DatasetDict(
        train=data.select(range(len(rows) - 2)), test=data.select(range(len(rows) - 2, len(rows)))
    )


def _text_row(kind: str, line: str, first: str, second: str, other: str, i: int) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {
        "language_modeling": {"text": line},
        "prompt_only": {"prompt": first},
        "prompt_completion": {"prompt": first, "completion": second},
        "preference": {"prompt": first, "chosen": second, "rejected": other},
        "implicit_prompt_preference": {"chosen": first + second, "rejected": first + other},
        "unpaired_preference": {"prompt": first, "completion": second, "label": i % 2 == 0},
        "stepwise_supervision": {
            "prompt": first,
            "completions": [second, other],
            "labels": [True, False],
        },
    }
    return rows[kind]


def _chat_row(kind: str, first: str, second: str, other: str, i: int) -> dict[str, Any]:
    user = [{"role": "user", "content": first}]
    right = [{"role": "assistant", "content": second}]
    wrong = [{"role": "assistant", "content": other}]
    rows: dict[str, dict[str, Any]] = {
        "language_modeling": {"messages": user + right},
        "prompt_only": {"prompt": user},
        "prompt_completion": {"prompt": user, "completion": right},
        "preference": {"prompt": user, "chosen": right, "rejected": wrong},
        "implicit_prompt_preference": {"chosen": user + right, "rejected": user + wrong},
        "unpaired_preference": {"prompt": user, "completion": right, "label": i % 2 == 0},
    }
    return rows[kind]


def load_dataset(
    path: str, name: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """Do what `datasets.load_dataset` does, for the data set of the tests of TRL."""
    if path != f"{OWNER}/zen" or name is None:
        raise ConnectionError(f"There is no stand-in for the data set {path}.")
    splits = make_dataset(name)
    if split is None:
        return _streamed(splits) if streaming else splits
    found = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if found is None:
        raise ValueError(f"Unknown split {split}.")
    data = splits[found[1]]
    data = data.select(range(int(found[2]))) if found[2] else data
    return data.to_iterable_dataset() if streaming else data


def _streamed(splits: Any) -> Any:
    from datasets import IterableDatasetDict

    return IterableDatasetDict({key: value.to_iterable_dataset() for key, value in splits.items()})


def pytest_configure() -> None:
    import datasets
    from transformers import TrainingArguments

    datasets.load_dataset = load_dataset
    original = TrainingArguments.__post_init__

    def use_cpu(self: Any) -> None:
        self.use_cpu = True  # else bfloat16, TRL's default, is refused without a GPU
        original(self)

    TrainingArguments.__post_init__ = use_cpu  # type: ignore[method-assign]


# -- models ---------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """Return a tokenizer that was trained on `import this`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(zen_lines() * 3, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(name: str, tokenizer: Any) -> Any:
    """Return a model of the class that its name says, as small as can be."""
    import transformers

    architecture = name.split("-")[1].replace("GptNeoX", "GPTNeoX")
    model_class = getattr(transformers, architecture)
    known = vars(model_class.config_class())
    size = {
        "hidden_size": 16,
        "n_embd": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "num_attention_heads": 4,
        "n_head": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "state_size": 4,
        "time_step_rank": 4,
        "expand": 2,
    }
    attributes = getattr(model_class.config_class, "attribute_map", {})
    chosen = {key: value for key, value in size.items() if key in known and key not in attributes}
    config = model_class.config_class(
        **chosen,
        num_labels=1,  # those of a reward; it is a property, and not among what is known
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return model_class(config)


def main(folder: Path) -> None:
    import torch

    tokenizer = make_tokenizer()
    for name in MODELS:
        cached = folder / f"models--{OWNER}--{name}"
        shutil.rmtree(cached, ignore_errors=True)
        snapshot = cached / "snapshots" / COMMIT
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(COMMIT)
        torch.manual_seed(0)
        try:
            make_model(name, tokenizer).save_pretrained(snapshot)
        except Exception as error:  # the others are worth having
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        tokenizer.save_pretrained(snapshot)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
