"""Masking of secrets, for everything that is recorded, logged or shown.

Four kinds of secrets are replaced by `***`:

- values of keys whose names look secret, such as `api_key`, `hfToken` or `slack-webhook-url`;
- what grants access in a URL: user info, signed queries, the paths of known webhooks;
- texts of a known shape: private keys, authorization headers, tokens of well-known services;
- known values, wherever they stand: those of environment variables with such names, and those that
  `remember_secrets` was given. They have at least eight characters and are no plain words, such as
  `training`: records consist of such words.

Running text is not interpreted: "password=hush" stays, unless hush is a known value. Only on a
command line, in a mapping and for a field is the value known to belong to the name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

MASK = "***"

_MIN_LENGTH = 8  # characters of a value that is masked wherever it stands
_MIN_PATH = 12  # the same for the path of a URL
_PLAIN_WORD = re.compile(r"[a-z]+\d{0,3}(?:_[a-z]+\d{0,3})*")

# -- names ----------------------------------------------------------------------------------------


def _split_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")
_SECRET_WORDS = _split_words(
    "apikeys apitoken auth authorization bearer cookie cookies credential credentials dsn jwt "
    "passcode passphrases passwords pwd secret secrets token webhooks"
)
_SECRET_ENDINGS = (  # of words without separators, such as PGPASSWORD
    *("accesskey", "accesstoken", "apikey", "authtoken", "hftoken", "passphrase", "passwd"),
    *("password", "privatekey", "secretkey", "webhook"),
)
_KEYS = _split_words(  # before `key`: by itself it is the key of an ordinary mapping
    "access account anthropic api auth aws azure client comet deploy deployment encryption gcp "
    "google hf ingest integration license master mlflow neptune openai private secret service "
    "session shared signing ssh storage subscription wandb webhook"
)
_AFTER = {  # words that hold a secret only after one of these
    "key": _KEYS,
    "keys": _KEYS,
    "tokens": _split_words("access api auth bearer hf refresh secret session"),
    "pass": _split_words("admin db login mail mysql postgres redis root smtp user"),
}
_NOT_SECRET_TOKENS = _split_words(  # before `token`: parts of a text
    "additional audio begin blank bos by class cls decoder distill each end eod eos eot first "
    "image last mask max min n new next num pad per prev previous prompt register sep sink space "
    "special start stop unk video"
)
_SUFFIXES = _split_words("header headers string text uri url value")


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a key, option or variable of this name holds a secret.

    The last word counts, in snake, kebab or camel case: `hf_token`, `HF-Token` and `hfToken` hold
    a secret; `tokens`, `token_count`, `pad_token`, `sort_key` and `author` do not.
    """
    if "/" in name or " " in name:
        return False  # a metric such as `loss/token`, or a text
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and words[-1] in _SUFFIXES:
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _AFTER:
        return before in _AFTER[last]
    if last == "token":
        return before not in _NOT_SECRET_TOKENS
    return last in _SECRET_WORDS or last.endswith(_SECRET_ENDINGS)


# -- texts ----------------------------------------------------------------------------------------

# No pattern may take quadratic time: names are short, and begin where a word begins.
_URL = re.compile(r"(?<![a-zA-Z0-9])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s\"'<>`]+")
_USER_INFO = re.compile(r"([^:]+://)(?:[^\s/?#]+|[^\s/:?#]+:(?!\d+/)[^\s@]+)@")
_QUERY = re.compile(r"(?<=[?&;#])([^?=&;#\s]+)=([^&;#\s]+)")
_QUERY_NAMES = _split_words(
    "awsaccesskeyid code googleaccessid hmac key se sig signature x-amz-credential x-amz-signature "
    "x-goog-credential x-goog-signature"
)
_WEBHOOK = re.compile(
    r"(://(?:hooks\.(?:slack|zapier)\.com|hc-ping\.com|api\.telegram\.org|"
    r"(?:ptb\.|canary\.)?discord(?:app)?\.com/api/webhooks|"
    r"[\w-]{1,60}\.webhook\.office\.com)/)[^\s?#]+"
)
_GAP = r"(?:\s|\\+[nr])*+"  # line feeds may be escaped
_PRIVATE_KEY = re.compile(  # one may be cut, without its end
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    rf"{_GAP}(?:[\w-]{{1,40}}: [^\r\n\\]{{1,200}}{_GAP}){{0,5}}(?:[A-Za-z0-9+/=]{{8,}}+{_GAP})++"
)
_SCHEME = re.compile(  # with a digit, a capital within, or several parts: not "bearer certificates"
    r"(?i:\b(bearer|basic)) +(?=[A-Za-z]*\d|[A-Za-z0-9]+[._~][A-Za-z0-9]|[a-z]+[A-Z]|\S{24})"
    r"[A-Za-z0-9+/._~-]{6,}=*"
)
_TOKEN = re.compile(  # of well-known services: they are recognised by how they begin
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI, Stripe
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|hf_[A-Za-z0-9]{30,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r")(?![A-Za-z0-9])"
)
_CONNECTION_FIELD = r"((?:account|sharedaccess)key|password|pwd)=[^\s;'\"]{1,200}"
_CONNECTION_STRING = re.compile(  # a field behind another one, or before another one
    rf"(?i)(?:(?<=;)|(?<=; )){_CONNECTION_FIELD}|\b{_CONNECTION_FIELD}(?=;)"
)


def mask_text(text: str) -> str:
    """Return a text without secrets: known values, and those of a known shape."""
    return _mask_patterns(mask_known_values(text))


def _mask_patterns(text: str) -> str:
    """Mask what looks secret in a text; the result depends on nothing but the text."""
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    if "://" in text:
        text = _URL.sub(lambda found: _mask_url(found[0]), text)
    if "=" in text:
        text = _CONNECTION_STRING.sub(rf"\1\2={MASK}", text)
    return _TOKEN.sub(MASK, _SCHEME.sub(rf"\1 {MASK}", text))


def _mask_url(url: str) -> str:
    found = _USER_INFO.match(url)
    if found is not None and not found[0].endswith("ssh://git@"):  # not the name of a person
        url = f"{found[1]}{MASK}@{url[found.end() :]}"
    url = _WEBHOOK.sub(rf"\1{MASK}", url)
    return _QUERY.sub(_mask_query, url) if "=" in url else url


def _mask_query(found: re.Match[str]) -> str:
    name = found[1]
    is_secret = name.lower() in _QUERY_NAMES or is_secret_name(name)
    return f"{name}={MASK}" if is_secret else found[0]


_KEY = re.compile(r"([\w.\[\]-]+)['\" ]*[:=]")


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets: `--name value`, `name=value`, `a={name: value}`."""
    masked: list[str] = []
    is_value = False  # of the option before
    for argument in arguments:
        is_option = re.match(r"--|-.?$", argument) is not None
        if is_value and not is_option:
            masked.append(MASK)
        elif found := next(filter(_is_secret_key, _KEY.finditer(argument)), None):
            masked.append(f"{mask_text(argument[: found.end()])}{MASK}")
        else:
            masked.append(mask_text(argument))
        is_value = argument.startswith("-") and _has_secret_name(argument)
    return masked


def _is_secret_key(found: re.Match[str]) -> bool:
    return _has_secret_name(found[1])


def _has_secret_name(name: str) -> bool:
    """Return whether a part of a key such as `hooks[0].api_key` looks secret."""
    return any(is_secret_name(part) for part in re.split(r"[.\[\]]+", name))


# -- nested values --------------------------------------------------------------------------------

_MAX_DEPTH = 100


def mask_secrets(value: Any, *, by_name: bool = True, known_values: bool = True) -> Any:
    """Return mappings, lists and texts without secrets, at any depth.

    None, booleans and empty values stay, also under a secret name, and so do objects of other
    types: convert them to JSON before. A container within itself, or within more than a hundred
    others, becomes "…". `by_name=False` is for mappings whose keys come from elsewhere: a package
    may be called `google-auth`. Without `known_values`, the result depends on nothing but the
    value, as the hash of a configuration must.
    """
    mask = mask_text if known_values else _mask_patterns

    def mask_value(value: Any, outer: tuple[int, ...]) -> Any:
        if isinstance(value, str):
            return mask(value)
        if not isinstance(value, Mapping | list | tuple):
            return value
        if id(value) in outer or len(outer) >= _MAX_DEPTH:
            return "…"
        outer = (*outer, id(value))
        try:
            items = list(value.items()) if isinstance(value, Mapping) else list(value)
        except Exception as error:  # of the value's own methods
            return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"
        if isinstance(value, Mapping):
            return {
                mask(key) if isinstance(key, str) else key: (
                    MASK if by_name and _is_secret_item(key, item) else mask_value(item, outer)
                )
                for key, item in items
            }
        masked = [mask_value(item, outer) for item in items]
        return tuple(masked) if type(value) is tuple else masked

    return mask_value(value, ())


def _is_secret_item(key: Any, item: Any) -> bool:
    if item is None or isinstance(item, bool) or not isinstance(key, str):
        return False
    is_container = isinstance(item, str | Mapping | list | tuple)
    return is_secret_name(key) and not (is_container and len(item) == 0)


def masked_repr(value: Any, *names: Any) -> str:
    """Return the `repr` of a value for a message; the mask, if one of its names looks secret."""
    if any(isinstance(name, str) and is_secret_name(name) for name in names):
        return MASK
    return mask_text(repr(mask_secrets(value) if isinstance(value, dict | list) else value))


# -- known values ---------------------------------------------------------------------------------

_NOT_SECRET_VARIABLES = ("PWD", "OLDPWD")  # the shell's working folders
_remembered: set[str] = set()
_scanned: Any = None  # the environment at the last scan
_pattern: re.Pattern[str] | None = None


def remember_secrets(value: Any, *, is_secret: bool = False) -> None:
    """Mask the secrets of a configuration from now on wherever they stand, also in error texts.

    They are the values of keys that look secret; with `is_secret`, the value itself.
    """
    global _pattern
    left: list[tuple[Any, bool]] = [(value, is_secret)]
    seen: set[tuple[int, bool]] = set()  # a container may be within itself
    while left:
        value, is_secret = left.pop()
        if isinstance(value, Mapping | list | tuple):
            if (id(value), is_secret) not in seen:
                seen.add((id(value), is_secret))
                with suppress(Exception):  # of the value's own methods
                    left += _inner_values(value, is_secret)
        elif is_secret and isinstance(value, str | int):
            forms = _written_forms(value)
            if not forms <= _remembered:
                _remembered.update(forms)
                _pattern = None


def _inner_values(value: Any, is_secret: bool) -> list[tuple[Any, bool]]:
    """Return the values in a container, and whether each of them is a secret."""
    if isinstance(value, Mapping):
        return [(item, is_secret or _is_secret_item(key, item)) for key, item in value.items()]
    return [(item, is_secret) for item in value]


def _written_forms(value: str | int) -> set[str]:
    """Return how a value that is masked everywhere may be written: escaped, in a URL, its path."""
    text = str(value)
    if len(text) < _MIN_LENGTH or _PLAIN_WORD.fullmatch(text):
        return set()
    forms = {text, repr(text)[1:-1], json.dumps(text)[1:-1]}
    with suppress(ValueError):  # lone surrogates, or not a URL
        forms |= {quote(text), quote(text, safe=""), quote_plus(text)}
        path = urlsplit(text)._replace(scheme="", netloc="").geturl() if "://" in text else ""
        forms |= {path} if len(path) >= _MIN_PATH else set()
    return forms


def mask_known_values(text: str) -> str:
    """Return a text without the values of secret environment variables, and remembered ones."""
    pattern = _known_values()
    return text if pattern is None else pattern.sub(MASK, text)


def _known_values() -> re.Pattern[str] | None:
    """Return the pattern of all known values; None if there are none."""
    global _scanned, _pattern
    # Comparing this mapping takes a microsecond; os.environ decodes each of its values.
    environment: Any = getattr(os.environ, "_data", os.environ)
    if environment != _scanned:
        _scanned = dict(environment)
        for name, value in os.environ.items():
            is_path = value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111
            if is_secret_name(name) and name not in _NOT_SECRET_VARIABLES and not is_path:
                remember_secrets(value, is_secret=True)
    if _pattern is None and _remembered:
        longest_first = sorted(_remembered, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))
    return _pattern
