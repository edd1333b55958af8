"""Cuts a text into words.

Control characters and written escapes (a backslash and n) are spaces. NFKC and lower case; letters
and digits that follow each other are a word, also with one apostrophe inside; every other sign that
is no space is a word. Han and kana, which are written without spaces, are a word each.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import islice

TOKENIZER = "nfkc-lower-1"  # its name in model files; a change of words needs a new one
MOST_CHARACTERS = 8_192  # of a normalized text: NFKC can make 18 characters of one

CONTROLS = r"[\x01-\x1f\x7f-\x9f]"
_SPACES = re.compile(rf"\\[tnr]|{CONTROLS}")

_SINGLE = "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTERS = rf"[^\W{_SINGLE}]+"
WORD = re.compile(rf"[{_SINGLE}]|{_LETTERS}(?:'{_LETTERS})?|[^\w\s]")


def plain(text: str) -> str:
    """A text whose control characters and written escapes became spaces.

    >>> plain("reset my\\\\npassword")
    'reset my password'
    """
    return _SPACES.sub(" ", text)


def words_of(text: str, most: int) -> list[str]:
    """The first ``most`` words of a text, normalized.

    >>> words_of("Don't PANIC, ＡＢＣ 東京!", 256)
    ["don't", 'panic', ',', 'abc', '東', '京', '!']
    """
    normal = unicodedata.normalize("NFKC", plain(text)).lower().replace("\u2019", "'")
    return [match[0] for match in islice(WORD.finditer(normal[:MOST_CHARACTERS]), most)]


def cut_text(text: str, most: int) -> str:
    """A text of ``most`` characters or fewer; a longer one ends after the last whole word.

    >>> cut_text("it isn't so", 6), cut_text("東京の天気", 3), cut_text("abc", 2)
    ('it', '東京の', 'ab')
    """
    if len(text) <= most:
        return text
    start = text.rfind(" ", 0, most + 1) + 1
    # Two more characters show whether a word goes on, also after an apostrophe.
    ends = [start + found.end() for found in WORD.finditer(text[start : most + 2])]
    end = max((end for end in ends if end <= most), default=start)
    return text[:end].strip() or text[:most]  # it may begin with a longer word
