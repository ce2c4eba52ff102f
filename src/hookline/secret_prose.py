"""Secrets in running text: private keys, authorization schemes, and `password: x`.

Ordinary prose stays: "Basic training", "the token: a part of a word", "password: Unknown field".
Each function takes linear time.
"""

from __future__ import annotations

import base64
import binascii
import re

from hookline.secret_names import is_secret_name, split_words

__all__ = ["MASK", "mask_pem_blocks", "mask_prose", "mask_schemes"]

MASK = "***"

# -- private keys ---------------------------------------------------------------------------------

_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?)-----")
_MAX_PEM = 20_000  # characters between its first and its last line
_GAP = r"(?:\s|\\+[nr])*+"  # line feeds may be escaped
_PEM_LINES = re.compile(rf"{_GAP}(?:[A-Za-z0-9+/=]{{16,}}+{_GAP})++")


def mask_pem_blocks(text: str) -> str:
    """Return a text with the contents of private keys masked; one may be cut, without its end."""
    if "PRIVATE KEY" not in text:
        return text
    parts: list[str] = []
    end = 0
    next_end = text.find("-----END ")
    for found in _PEM.finditer(text):
        start = found.end()
        if start < end:
            continue
        if -1 < next_end < start:  # each part of the text is searched once
            next_end = text.find("-----END ", start)
        last = next_end
        has_end = text.startswith(f"-----END {found[1]}-----", max(last, 0))
        if not has_end or not start <= last <= start + _MAX_PEM:
            lines = _PEM_LINES.match(text, start)
            last = start if lines is None else lines.end()
        if text[start:last] not in ("", MASK):
            parts += [text[end:start], MASK]
            end = last
    return "".join([*parts, text[end:]])


# -- authorization --------------------------------------------------------------------------------

_SCHEME = re.compile(r"(?i)\b(bearer|basic)( +)([A-Za-z0-9+/._~-]{6,}=*)")
_TOKEN = re.compile(  # has a digit and a letter, is in several parts, mixes cases, or is long
    r"(?=.*\d)(?=.*[A-Za-z])|.*[A-Za-z0-9][._~+/][A-Za-z0-9]|.*[a-z][A-Z]|.{24}|.*=$"
)


def mask_schemes(text: str) -> str:
    """Return a text with what follows `Bearer` and `Basic` masked, if it is a credential."""
    return _SCHEME.sub(_mask_scheme, text)


def _mask_scheme(found: re.Match[str]) -> str:
    scheme, space, value = found.groups()
    is_basic = scheme.lower() == "basic"
    is_secret = _is_user_and_password(value) if is_basic else _TOKEN.match(value) is not None
    return f"{scheme}{space}{MASK}" if is_secret else found[0]


def _is_user_and_password(value: str) -> bool:
    """Return whether a value is `user:password` in base64."""
    value = value.rstrip("=.")
    try:
        decoded = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return False
    return b":" in decoded and all(byte >= 32 for byte in decoded)


# -- names and values -----------------------------------------------------------------------------

_NAME = r"[A-Za-z_][\w.\[\]-]{0,120}"
_NAMED = re.compile(rf"(?<!\w)({_NAME})(?: ?: {{1,20}}| {{1,20}}= {{1,20}})(?=[^\s'\"<{{(\[$%*…])")
_VALUE = re.compile(r"[^\s,;'\"(){}\[\]<>]+")
_END = re.compile(r"[ \t]{0,20}(?:$|[\r\n,;)\]}'\"])")  # of a statement: no other words follow
_CREDENTIAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{8}")
_PASSWORD = re.compile(r"(?i)(?:^|[\W_])(?:\w{0,40}(?:password|passwd|passphrase)|passcode|pwd)$")
_NO_VALUES = split_words(  # types, and what messages say about a value
    "any bool bytes empty expected expired false float forbidden got incorrect int invalid "
    "missing must no none not null object optional required secretstr set str string true unknown "
    "unset was wrong yes"
)


def mask_prose(text: str) -> str:
    """Return a text with the values of `password: x` and `api_key = x9x9x9x9` masked.

    A password is masked if it is the last word of a statement, or has a digit. Values of other
    secret names are masked if they look like a credential, with letters and digits.
    """
    if ": " not in text and "= " not in text:
        return text
    parts: list[str] = []
    end = 0
    for found in _NAMED.finditer(text):
        if found.start() < end:
            continue
        value = _VALUE.match(text, found.end())
        if value is not None and _is_secret(text, found[1], value):
            shown = value[0].rstrip(".:!?")
            parts += [text[end : found.end()], MASK]
            end = found.end() + len(shown)
    return "".join([*parts, text[end:]]) if parts else text


def _is_secret(text: str, name: str, value: re.Match[str]) -> bool:
    word = value[0].rstrip(".:!?")
    if not word or word.lower() in _NO_VALUES or "://" in word or word.startswith(MASK):
        return False
    name = re.split(r"[.\[\]]+", name.rstrip(".[]"))[-1]
    if not is_secret_name(name) or name in re.split(r"\W+", word):  # `password = args.password`
        return False
    is_code = text[value.end() : value.end() + 1] in ("(", "[")  # `password = getpass()`
    if _CREDENTIAL.match(word):
        return not is_code
    if _PASSWORD.search(name) is None or is_code:
        return False
    return any(char.isdigit() for char in word) or _END.match(text, value.end()) is not None
