"""Names of keys, options and variables that hold secrets."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["is_secret_name", "split_words"]


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")
_SECRET_WORDS = split_words(
    "apikeys apitoken auth authorization bearer cookie cookies credential credentials dsn jwt "
    "passcode passphrases passwords pwd secret secrets token webhooks"
)
_SECRET_ENDINGS = (  # of words without separators, such as PGPASSWORD
    *("accesskey", "accesstoken", "apikey", "authtoken", "hftoken", "passphrase", "passwd"),
    *("password", "privatekey", "secretkey", "webhook"),
)
_KEYS = split_words(  # before `key`: by itself it is the key of an ordinary mapping
    "access account anthropic api auth aws azure client comet deploy deployment encryption gcp "
    "google hf ingest integration license master mlflow neptune openai private secret service "
    "session shared signing ssh storage subscription wandb webhook"
)
_TOKENS = split_words("access api auth bearer hf refresh secret session")  # before `tokens`
_PASSES = split_words("admin db login mail mysql postgres redis root smtp user")
_NOT_SECRET_TOKENS = split_words(  # before `token`: parts of a text
    "additional audio begin blank bos by class cls decoder distill each end eod eos eot first "
    "image last mask max min n new next num pad per prev previous prompt register sep sink space "
    "special start stop unk video"
)
_SUFFIXES = split_words("header headers string text uri url value")
_CONNECTION = (["connection"], ["conn"], ["database"])  # before a suffix: `connection_string`


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a key, option or variable of this name holds a secret.

    The last word counts, in snake, kebab or camel case: `hf_token`, `HF-Token` and `hfToken` hold
    a secret; `tokens`, `token_count`, `pad_token`, `sort_key` and `author` do not.
    """
    if "/" in name or " " in name:
        return False  # a metric such as `loss/token`, or a text
    words = [word.lower() for word in _WORDS.findall(name)]
    has_suffix = False
    while len(words) > 1 and words[-1] in _SUFFIXES:
        words.pop()
        has_suffix = True
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys"):
        return before in _KEYS
    if last == "tokens":
        return before in _TOKENS
    if last == "pass":
        return before in _PASSES
    if last == "token":
        return before not in _NOT_SECRET_TOKENS
    if has_suffix and words in _CONNECTION:
        return True
    return last in _SECRET_WORDS or last.endswith(_SECRET_ENDINGS)
