"""Rewrites mathematical answers, as people and models write them, to LaTeX that math-verify reads."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

MAX_CHARACTERS = 2000  # of the longest answer that is rewritten; longer answers are compared as they are
_MAX_EXPONENT = 60  # of ten in a number that is written out

_COMMANDS = ("pi", "infty", "le", "ge", "ne", "pm", "cup", "cap", "in", "emptyset", "theta")
# Signs for which Unicode has no ASCII equivalent (NFKC), as it has for those of full width.
_SIGNS = {
    **dict.fromkeys("−‐‑‒–—⁻₋", "-"),
    **dict.fromkeys("×✕✖⨯", r"\times "),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("÷∕⁄", "/"),
    "∗": "*",
    "٪": "%",
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2061\u2062\u2063", ""),
    **dict.fromkeys("°º", r"^\circ "),
    "٫": ".",
    "٬": ",",
    **{sign: rf"\{command} " for sign, command in zip("π∞≤≥≠±∪∩∈∅θ", _COMMANDS, strict=True)},
}
_POWERS = {**dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)), "⁺": "+", "⁻": "-", "ⁿ": "n", "ⁱ": "i"}
_INDICES = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))

_POWER = re.compile(f"[{''.join(_POWERS)}]+")
_INDEX = re.compile(f"[{''.join(_INDICES)}]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")
# "12 345" and "12\,345"; "1.234.567,8"; "1 1/2" and "1 and 1/2".
_SPACED = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?:\\[,;:! ]|\{,\}|['’ ])\d{3})+(?:,(\d+)(?! ?[\d,]))?(?! ?\d)")
_DOTTED = re.compile(r"(?<![\d.,(\[])\d{1,3}(?:(?:\.\d{3}){2,}(?:,\d+)?|(?:\.\d{3})+,\d{1,2})(?![\d.,])")
_MIXED = re.compile(
    r"(?<![\d.,/^_{}])(?<!\d )(-?)(\d{1,9})(?: +| *\+ *| *& *| and )(\d{1,6}) ?/ ?(\d{1,6})(?![\d/^]|\.\d)"
)
_NUMBER = r"(?<![\w.,\\])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.,\\])[+-]?\.\d+"
# "1.5e-3"; "1.5 \times 10^{-3}"; "12,345%" and "\frac{1}{2} percent".
_SCIENTIFIC = re.compile(r"(?<![\w.,\\^])([+-]?\d{1,40}(?:\.\d{0,40})?)[eE]([+-]?\d{1,3})(?![\w.])")
_TIMES_TEN = re.compile(
    r"(?<![\w.,\\^])([+-]?\d{1,40}(?:\.\d{0,40})?) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?"
    r"(?:\{ ?([+-]?\d{1,3}) ?\}|([+-]?\d{1,3}))(?![\w.])"
)
_PERCENT = re.compile(
    rf"({_NUMBER}|\\[dt]?frac\{{-?\d{{1,9}}\}}\{{\d{{1,9}}\}})(?:\s|\\[,;:! ]|\\text\{{|~)*"
    r"(?:\\?%|per ?cent(?:age)?\b|pct\b)\}?",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_CURRENCY = re.compile(
    r"(?:[€£¥₹₩₽₪₫฿¢₿]|\\(?:euro|pounds|yen)\b(?:\{\})?|(?:US|A|C)\\?\$) ?(?=[-\d.])|(?<=\d) ?[€£¥₹₩₽₪₫฿¢₿]"
)
_BARE_POWER = re.compile(r"\^ ?([+-]\d+)")  # 10^-3, which LaTeX would read as 10 to the power of a sign
_BOX_START = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?=[^\s{$]))")
_BARE_BOX = re.compile(r"[^$\s]+?(?=\$|\\[\])]|[.,;:]*(?:\s|\Z))")  # \boxed 5, as some solutions have it
_PI = re.compile(r"(?<![A-Za-z\\])(pi|infinity|inf)(?![A-Za-z])")
_EDGE = re.compile(r"^(?:\s|\\[,;:! ]|~)+|(?<=\d)\.$|(?:\\$|\s|\\[,;:! ]|~)+$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"(?<=\d) ?\^ ?(?:\\circ|\{ ?\\circ ?\})(?![A-Za-z]) ?(?![CFK])")
# Two words that follow each other, or a word before a colon.
_SENTENCE = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or) )[A-Za-z]{2,}[, ]+(?!(?:and|or)\b)[A-Za-z]{2,}|[A-Za-z] ?:")

# "#### 1,072" on a line of its own, as in GSM8K; a heading of Markdown has words.
_MARKED = re.compile(r"^#### *([-+$€£]{0,2}(?:\d[\d,./]*(?: \d[\d,./]*)*|\.\d+)%?)\.? *$", re.MULTILINE)
_STATEMENT = re.compile(r"\banswer(?:\W{0,3}is\b)?(?:\s+(?:option|choice))?\W*", re.IGNORECASE)
# A capital letter that is neither a word of a sentence ("I think", "A car") nor part of a formula ("N + 1").
_LETTER = re.compile(r"([A-Z])(?=[)\]}*_\"']*(?:\s*$|[.,;:!\n]| (?:because|since|as)\b))")
# Markdown's emphasis and code: **3/4**, not the power 2**3.
_EMPHASIS = re.compile(r"(?<![\w*`])(\*\*|\*|__|`)(?=[^\s*`])([^\n*`]*)(?<=\S)\1(?![\w*`])")
_BOXED_LETTER = re.compile(r"[\s($]*([A-Z])(?:[.:)]|\s*$)")  # "B", "(B) 4", "B. 4"
_CHOICE = re.compile(r"\(?[A-Z]\)?")

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

_UNIT_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_GAP = re.compile(r"\\[,;:! ]|~|\\quad")
_UNIT_POWER = r"(?: ?\^ ?\{? ?-?\d ?\}?)?"
_UNIT_WORD = rf"[A-Za-z]+{_UNIT_POWER}"
_UNIT = re.compile(rf"(?<=[\d)}}\].])( *)({_UNIT_WORD}(?:(?: ?/ ?| ?\\cdot ?| ?\* ?| ){_UNIT_WORD})*) ?\.?$")


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer in both readings of percentages, and its unit."""

    text: str  # LaTeX without percent signs: 50 for 50%
    as_share: str  # LaTeX with every percentage as a share of one: 0.5 for 50%
    unit: str | None = None  # canonical unit after the value; None: no unit, or an unknown unit

    @property
    def has_percent(self) -> bool:
        return self.text != self.as_share


def rewrite_answer(text: str) -> AnswerText:
    """Rewrite a boxed answer or a reference."""
    if len(text) > MAX_CHARACTERS:
        return AnswerText(text, text)
    # Signs first: the other patterns know digits and operators in ASCII alone.
    plain = _PI.sub(lambda name: r"\pi " if name[1] == "pi" else r"\infty ", rewrite_signs(text).strip())
    plain = re.sub(r"^#\s*(?=[-\d])", "", _EDGE.sub("", plain))
    plain = _CURRENCY.sub("", plain)
    value, unit = split_unit(plain)
    value = rewrite_numbers(_DEGREES.sub("", value)).strip()
    return AnswerText(_divide_percentages(value, 1), _divide_percentages(value, 100), find_canonical_unit(unit))


def rewrite_tail(text: str) -> AnswerText:
    """Rewrite a text's end, where math-verify searches the answer."""
    plain = _EMPHASIS.sub(r"\2", rewrite_signs(text[-MAX_CHARACTERS:]))
    plain = rewrite_numbers(_CURRENCY.sub("", plain))
    return AnswerText(_divide_percentages(plain, 1), _divide_percentages(plain, 100))


def find_marked_answer(response: str) -> str | None:
    """Find the number on the last line that GSM8K's #### begins."""
    marked = list(_MARKED.finditer(response))
    return marked[-1][1].rstrip(",.") if marked else None


def find_statement(response: str) -> re.Match[str] | None:
    """Find the last words that announce an answer, such as "the answer is"."""
    return max(_STATEMENT.finditer(response), key=re.Match.start, default=None)


def find_chosen_letter(response: str, box: str | None) -> str | None:
    """Find the letter that begins a box, else the one behind "the answer is"."""
    boxed = None if box is None else _BOXED_LETTER.match(_TEXT.sub(r"\1", box))
    if boxed is not None:
        return boxed[1]
    statement = find_statement(response)
    letter = None if statement is None else _LETTER.match(response, statement.end())
    return None if letter is None else letter[1]


def is_letter(answer: str) -> bool:
    """True for the letter of a choice: B, (B)."""
    return _CHOICE.fullmatch(answer.strip()) is not None


def list_boxes(text: str) -> Iterator[str | None]:
    """Yield contents of the boxes from the last to the first; None: not closed."""
    for start in reversed(list(_BOX_START.finditer(text))):
        if not start[0].endswith("{"):
            bare = _BARE_BOX.match(text, start.end())
            yield bare and bare[0]
            continue
        depth, content = 1, None
        for position in range(start.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                content = text[start.end() : position]
                break
        yield content


def has_same_words(response: str, reference: str) -> bool:
    """True for answers of equal words."""
    texts = (_TEXT.sub(r"\1", text).strip(" .!$*\"'") for text in (response, reference))
    first, second = (" ".join(text.split()).casefold() for text in texts)
    return first == second and len(first) > 1 and first.replace(" ", "").isalpha()


def is_unreadable(text: str) -> bool:
    """True for a reference that math-verify surely cannot read."""
    # Only certain cases are named: a reference that math-verify might read is better compared than reported.
    plain = rewrite_answer(text).text
    depth = 0
    for sign in re.sub(r"\\[{}]", "", plain):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return True
    if re.search(r"\d", plain) and _SENTENCE.search(_TEXT.sub("", plain)) and not re.search(r"\\boxed|\$", text):
        return True  # a sentence around the answer
    return depth != 0 or not plain.isascii() or not plain.isprintable() or not re.search(r"[A-Za-z0-9]", plain)


def rewrite_signs(text: str) -> str:
    """Replace digits and signs outside ASCII by those of LaTeX."""
    if text.isascii():
        return text
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text.replace("√ ", "√"))
    text = _INDEX.sub(lambda run: f"_{{{''.join(_INDICES[sign] for sign in run[0])}}}", text)
    text = _POWER.sub(lambda run: f"^{{{''.join(_POWERS[sign] for sign in run[0])}}}", text)
    return "".join(_rewrite_sign(sign) for sign in text)


@lru_cache(maxsize=4096)
def _rewrite_sign(sign: str) -> str:
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    digit = unicodedata.decimal(sign, None)
    if digit is not None:
        return str(digit)
    compatible = unicodedata.normalize("NFKC", sign)
    above, bar, below = compatible.partition("\u2044")
    if bar and above.isdecimal() and below.isdecimal():  # ½; a blank keeps 1½ from being 11/2
        return f" {above}/{below}"
    return compatible if compatible.isascii() else sign


def rewrite_numbers(text: str) -> str:
    """Rewrite separated, mixed and scientific numbers plainly."""
    text = _BARE_POWER.sub(r"^{\1}", _SPACED.sub(_join_digits, text))
    text = _DOTTED.sub(lambda number: number[0].replace(".", "").replace(",", "."), text)
    text = _MIXED.sub(_make_improper, text)
    text = _SCIENTIFIC.sub(lambda number: _write_out(number[0], number[1], number[2]), text)
    return _TIMES_TEN.sub(lambda number: _write_out(number[0], number[1], number[2] or number[3]), text)


def _join_digits(number: re.Match[str]) -> str:
    if number[1] is None:
        return re.sub(r"\D", "", number[0])
    is_pair = number.string[max(number.start() - 1, 0) : number.start()] in ("(", "[")
    integer = re.sub(r"\D", "", number[0][: number.start(1) - number.start() - 1])
    return f"{integer}{',' if is_pair else '.'}{number[1]}"


def _make_improper(number: re.Match[str]) -> str:
    sign, integer, above, below = number[1], int(number[2]), int(number[3]), int(number[4])
    if not 0 < above < below:
        return number[0]  # 2 3/2 is no mixed number
    return f"{sign}{integer * below + above}/{below}"


def _write_out(text: str, factor: str, exponent: str) -> str:
    return text if abs(int(exponent)) > _MAX_EXPONENT else f"{Decimal(factor).scaleb(int(exponent)):f}"


def _divide_percentages(text: str, divisor: int) -> str:
    # Decimals and fractions are exact, so that equal answers stay equal.
    def divide(number: re.Match[str]) -> str:
        fraction, digits = _FRACTION.fullmatch(number[1]), number[1].replace(",", "")
        if divisor == 1 or len(digits) > _MAX_EXPONENT:
            return number[1]
        if fraction is not None:
            return f"{fraction[1]}/{int(fraction[2]) * divisor}"
        return f"{Decimal(digits) / divisor:f}"

    return _PERCENT.sub(divide, text)


def split_unit(answer: str) -> tuple[str, str | None]:
    """Split an answer into its value and unit.

    A unit is a known spelling, with powers, products and quotients, or words of three letters or more after a blank,
    such as "apples". A single letter right behind a number, as in 5m, is a variable.
    """
    plain = " ".join(_GAP.sub(" ", _UNIT_TEXT.sub(r" \1 ", answer)).split())
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
