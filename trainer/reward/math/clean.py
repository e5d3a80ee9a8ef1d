"""Bring two ways of writing the same LaTeX to one text, without changing what it means."""

from __future__ import annotations

import re
import unicodedata

ROW = "\x00"  # stands for a matrix row's double backslash, so that no rule takes it for a command
THIN = "\u2009"  # kept apart from a plain space: it may group the digits of a number

_SYMBOLS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": r"\times ",
    "\u22c5": r"\cdot ",
    "\u00b7": r"\cdot ",
    "\u00f7": "/",
    "\u2044": "/",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u222a": r"\cup ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u00b1": r"\pm ",
    "\u00b0": "",
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RULES = [
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?"), ""),
    (re.compile(r"\\!|\\(?:displaystyle|textstyle|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\[,;:]|(?<!\\)~"), THIN),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\ "), " "),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:textbf|textit|textrm|textnormal|emph|mbox)(?![A-Za-z])"), r"\\text"),
    (re.compile(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:bf|it|rm)(?![A-Za-z])"), ""),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\\?\$|[\u20ac\u00a3\u00a5]|\\(?:pounds|euro)(?![A-Za-z])"), ""),
    (re.compile(r"\\leq(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\geq(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"(?<!\\)%"), r"\\%"),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*percent\s*\}|\bpercent\b"), r"\\%"),
]


def clean(text: str) -> str:
    r"""One spelling: full-width digits, Unicode signs, sizes, spaces, fonts, currency, degrees, outer marks."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[¼-¾⅐-⅞]", lambda m: " " + m.group(), text)  # 3½ is 3 1/2, not 31/2
    text = re.sub("[\u2009\u202f\u00a0]", r"\\,", text)
    text = unicodedata.normalize("NFKC", text).replace("\\\\", ROW)
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"\\[()\[\]]", "", text) if re.match(r"\s*\\[(\[]", text) else text
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    before = None
    while before != text:
        before = text
        text = text.strip(" \t\r\n" + THIN)
        text = re.sub(r"^(?:\\approx(?![A-Za-z])|=)", "", text)
        text = re.sub(r"[.,;]+$", "", text)
    return squeeze(text).replace(ROW, "\\\\")


def squeeze(text: str) -> str:
    """Drop white space that separates nothing: `p - q` -> `p-q`, while `3 1/2` and words stay apart."""
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = re.sub(r"(?<![0-9A-Za-z]) (?=.)|(?<=.) (?![0-9A-Za-z])", "", text)
    return text


def unwrap_text(text: str) -> str:
    r"""`\text{East}.` -> `east`: the words alone, for case-blind comparison."""
    inner = re.fullmatch(r"\\(?:text|mathrm|operatorname)\s*\{(.*)\}", text, re.DOTALL)
    words = inner.group(1) if inner else text
    return " ".join(words.replace(THIN, " ").strip(" .,;!").split()).casefold()
