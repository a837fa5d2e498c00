"""Units after a number: where an answer's unit begins, and spellings of each unit."""

from __future__ import annotations

import re

# Spellings by quantity; the first of each unit is canonical.
_SPELLINGS = """
mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres
m meter meters metre metres; km kilometer kilometers kilometre kilometres
in inch inches; ft foot feet; yd yard yards; mi mile miles
mg milligram milligrams; g gram grams; kg kilogram kilograms; lb lbs; oz ounce ounces; t ton tons tonne tonnes
ms millisecond milliseconds; s sec secs second seconds; min mins minute minutes; h hr hrs hour hours
day days; week weeks; month months; yr year years
ml mL milliliter milliliters millilitre millilitres; l L liter liters litre litres; gal gallon gallons
deg degree degrees; rad radian radians
dollar dollars USD; cent cents; euro euros EUR
mph; kmh kph; Hz hertz; kHz kilohertz; MHz megahertz
N newton newtons; J joule joules; kJ kilojoule kilojoules; W watt watts; kW kilowatt kilowatts
V volt volts; A ampere amperes amp amps; ohm ohms; K kelvin kelvins; Pa pascal pascals; mol mole moles
bit bits; byte bytes; unit units
"""
_UNITS = _SPELLINGS.replace("\n", ";").split(";")
_CANONICAL = {name: names.split()[0] for names in _UNITS for name in names.split()}
_WORDS = """
and or if only for all any where with when not mod sin cos tan cot csc arcsin arccos arctan sinh cosh tanh log
exp max lim det gcd lcm dim percent percentage cent per pct sqrt frac cdot times infty choose text base
"""
_NOT_UNITS = frozenset(_WORDS.split())

_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_GAP = re.compile(r"\\[,;:! ]|~|\\quad")
_POWER = r"(?: ?\^ ?\{? ?-?\d ?\}?)?"
_WORD = rf"[A-Za-z]+{_POWER}"
_UNIT = re.compile(rf"(?<=[\d)}}\].])( *)({_WORD}(?:(?: ?/ ?| ?\\cdot ?| ?\* ?| ){_WORD})*) ?\.?$")


def split_unit(answer: str) -> tuple[str, str | None]:
    """Split an answer into its value and unit.

    A unit is a known spelling, with powers, products and quotients, or words of three letters or more after a blank,
    such as "apples". A single letter right behind a number, as in 5m, is a variable.
    """
    plain = " ".join(_GAP.sub(" ", _TEXT.sub(r" \1 ", answer)).split())
    match = _UNIT.search(plain)
    if match is None:
        return answer, None
    gap, unit = match[1], match[2]
    words = unit.split()
    is_known = find_canonical_unit(unit) is not None and bool(gap or len(unit) > 1) and words[0] != "per"
    is_counted = bool(gap) and all(word.isalpha() and len(word) > 2 and word not in _NOT_UNITS for word in words)
    return (plain[: match.start()], unit) if is_known or is_counted else (answer, None)


def find_canonical_unit(unit: str | None) -> str | None:
    """Find a unit's canonical spelling; None: unknown."""
    if unit is None:
        return None
    text = re.sub(r"[{} ]*\^[{ ]*(-?\d)[ }]*", r"^\1 ", unit).strip()
    text = re.sub(r"\b(?:square|sq) ([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"\bcubic ([A-Za-z]+)", r"\1^3", text)
    text = re.sub(r"([A-Za-z]+) squared\b", r"\1^2", text)
    text = re.sub(r" ?(?:\bper\b|/) ?", "/", text)
    factors = []
    for factor in re.findall(r"[/]?[^/* ]+", text.replace(r"\cdot", "*")):
        name, power = re.fullmatch(r"/?([^^]*)(\^.*)?", factor, re.DOTALL).groups()  # type: ignore[union-attr]
        canonical = _CANONICAL.get(name) or _CANONICAL.get(name.lower() if len(name) > 2 else name)
        if canonical is None:
            return None
        factors.append(("/" if factor[0] == "/" else "") + canonical + (power or ""))
    return "*".join(factors) or None
