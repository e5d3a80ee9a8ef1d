"""Split a unit off a number. Units are compared by name, never converted."""

from __future__ import annotations

import re

# One name per unit; single letters count only inside \text{} or \mathrm{}, elsewhere they are variables.
_NAMES = {
    "m": "meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "kg": "kg kilogram kilograms",
    "g": "gram grams",
    "lb": "pound pounds",
    "s": "sec second seconds",
    "min": "min minute minutes",
    "h": "hour hours hr hrs",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "degree": "degree degrees",
    "radian": "radian radians",
    "dollar": "dollar dollars",
    "cent": "cent cents",
    "unit": "unit units",
    "mph": "mph",
    "liter": "liter liters litre litres",
}
_CANONICAL = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|\d))?"
_TEXT = rf"\\(?:text|mathrm)\s*\{{[^{{}}]*\}}{_POWER}"
_PLAIN = rf"(?:(?:square|cubic|sq)\s+)?(?:{'|'.join(sorted(_CANONICAL, key=len, reverse=True))}){_POWER}"
_UNIT = re.compile(rf"(.*?[0-9}})\]%])\s*((?:{_TEXT})(?:\s*/?\s*(?:{_TEXT}))*|{_PLAIN})", re.DOTALL)


def split_unit(text: str) -> tuple[str, str]:
    r"""`5\text{ cm}^2` -> ("5", "cm^2"); `7 days` -> ("7", "day"); without a unit the second part is empty."""
    match = _UNIT.fullmatch(text)
    if not match or not re.search(r"\d", match.group(1)) or re.search(r"[A-Za-z]$", match.group(1)):
        return text, ""
    value, unit = match.groups()
    name = re.sub(r"\\(?:text|mathrm)|[{}\s.]", "", unit).casefold()
    return value.strip(), _CANONICAL.get(name, name)
