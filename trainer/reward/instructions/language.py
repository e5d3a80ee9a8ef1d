"""Which language is this? The same library as the public IFEval script, with its random numbers fixed."""

from __future__ import annotations

from langdetect import DetectorFactory, LangDetectException, detect

DetectorFactory.seed = 0  # the detector samples: without a seed the same text may get two verdicts


def language_of(text: str) -> str | None:
    """ISO 639-1 code (`zh-cn` and `zh-tw` for Chinese); None when the text has nothing to tell it by."""
    try:
        return detect(text)
    except LangDetectException:
        return None


def is_english(text: str) -> bool:
    # The detector skips words in capitals, of which some answers consist.
    return language_of(text.lower()) == "en"


def response_language(answer: str, language: str) -> bool:
    found = language_of(answer)
    return found is not None and language.lower() in (found, found.partition("-")[0])
