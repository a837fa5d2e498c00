"""Answers as a reader takes them: percent, powers, units, fractions, separators and the digits of other scripts."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from megatron_grpo.data.math_text import rewrite_answer, rewrite_numbers, rewrite_tail
from megatron_grpo.data.specs import find_last_box
from megatron_grpo.environments.math_answers import is_correct

EQUAL = {
    "50%": (
        *(r"\boxed{50\%}", r"\boxed{50}", r"\boxed{0.5}", "The answer is 50%", "so it is 50%", r"\boxed{50\,\%}"),
        *("The answer is 50 percent.", r"\boxed{50\text{ percent}}", r"\boxed{\frac{1}{2}}", r"so $50\%$", r"\(50\%\)"),
        *(r"\boxed{５０％}", r"\boxed{\frac{100}{2}\%}", "**50%**", r"\boxed{50 per cent}", r"= 50\%"),
    ),
    r"12.5\%": (r"\boxed{12.5}", r"\boxed{0.125}", r"\boxed{\frac18}", r"\boxed{\frac{25}{2}\%}", "It is 12.50 %."),
    "20 percent": (r"\boxed{20\%}", r"\boxed{1/5}", "the result is 20%"),
    "0.5": (r"\boxed{50\%}", "It is 50%."),
    "50": (r"\boxed{50\%}", "It is 50%."),
    "x²": (r"\boxed{x^2}", r"\boxed{x^{2}}", r"\boxed{x²}", r"\boxed{x \cdot x}"),
    "x^2+1": (r"\boxed{x²+1}", r"\boxed{x²＋1}"),
    "10^5": (r"\boxed{100000}", r"\boxed{1e5}", r"\boxed{10⁵}", r"\boxed{100,000}", r"\boxed{1 \times 10^5}"),
    "1e5": (
        r"\boxed{100000}",
        r"\boxed{10^5}",
        r"\boxed{1E5}",
        "The answer is 100,000.",
        r"\boxed{100\,000}",
        "it is 1e5",
    ),
    "1.5e-3": (r"\boxed{0.0015}", r"\boxed{1.5 \times 10^{-3}}", r"\boxed{1.5×10⁻³}", r"\boxed{1.5\cdot10^{-3}}"),
    "5 cm": (
        r"\boxed{5}",
        r"\boxed{5\text{ cm}}",
        r"\boxed{5\,\mathrm{cm}}",
        r"\boxed{5cm}",
        "It is 5 centimeters.",
        r"\boxed{5.0}",
    ),
    "5 m/s": (
        r"\boxed{5}",
        r"\boxed{5 \text{ m/s}}",
        r"\boxed{5\,\text{meters per second}}",
        r"\boxed{5\text{ m}/\text{s}}",
    ),
    r"5\text{ cm}": (r"\boxed{5}", r"\boxed{5 cm}"),
    "12 cm^2": (r"\boxed{12}", r"\boxed{12\text{ cm}^2}", r"\boxed{12 cm²}", r"\boxed{12\text{ square centimeters}}"),
    "18 dollars": (r"\boxed{18}", r"\boxed{\$18}", r"\boxed{18\text{ dollars}}", "It costs $18."),
    "3 apples": (r"\boxed{3}", r"\boxed{3\text{ apples}}", r"\boxed{3 \text{ red apples}}"),
    "½": (r"\boxed{1/2}", r"\boxed{\frac12}", r"\boxed{0.5}", "The answer is ½", r"\boxed{\dfrac{1}{2}}"),
    "1½": (r"\boxed{3/2}", r"\boxed{1\frac{1}{2}}", r"\boxed{1 1/2}", r"\boxed{1.5}"),
    "-2 3/4": (r"\boxed{-11/4}", r"\boxed{-2\frac{3}{4}}", r"\boxed{-2¾}", r"\boxed{−2.75}"),
    r"\dfrac{3}{4}": (r"\boxed{¾}", r"\boxed{0.75}", r"\boxed{\tfrac34}", "that makes ¾"),
    "-3": (r"\boxed{−3}", r"\boxed{–3}", "The answer is −3.", r"\boxed{－３}"),
    "−3": (r"\boxed{-3}",),
    "42": (
        r"\boxed{٤٢}",
        r"\boxed{４２}",
        r"\boxed{४२}",
        r"\boxed{42.}",
        "The answer is ４２",
        r"\boxed{#42}",
        r"\boxed{42\ }",
    ),
    "٤٢": (r"\boxed{42}",),
    "#5": (r"\boxed{5}", "It is 5."),
    "1234": (
        r"\boxed{1,234}",
        r"\boxed{1 234}",
        r"\boxed{1\,234}",
        r"\boxed{1{,}234}",
        "It is 1,234.",
        r"\boxed{1’234}",
    ),
    "1,234,567": (r"\boxed{1234567}", r"\boxed{1.234.567}", r"\boxed{1 234 567}"),
    "1.234.567": (r"\boxed{1234567}",),
    "1234.5": (r"\boxed{1.234,5}", r"\boxed{1,234.5}", r"\boxed{1234.50}"),
    "€5": (r"\boxed{5}", r"\boxed{5 €}", r"\boxed{5 euros}"),
    "$18.50": (r"\boxed{18.5}", r"\boxed{\$18.50}", "It costs $18.50."),
    "90°": (r"\boxed{90}", r"\boxed{90^\circ}", r"\boxed{90^{\circ}}", r"\boxed{90 \text{ degrees}}", r"\boxed{90°}"),
    "90": (r"\boxed{90^\circ}", r"\boxed{90°}"),
    "√2": (r"\boxed{\sqrt{2}}", r"\boxed{\sqrt2}", r"\boxed{√2}", r"\boxed{2^{1/2}}"),
    "2π": (r"\boxed{2\pi}", r"\boxed{2π}", r"\boxed{2 \pi}"),
    "pi": (r"\boxed{\pi}", r"\boxed{π}"),
    "6×7": (r"\boxed{42}", r"\boxed{6\cdot7}", r"\boxed{6·7}"),
    "True": (r"\boxed{true}", r"\boxed{\text{True}}", r"\boxed{\textbf{true}}"),
    "{1, 2}": (r"\boxed{\{1,2\}}", r"\boxed{\{2, 1\}}"),
    "(−1, 2)": (r"\boxed{(-1,2)}", r"\boxed{（−1，2）}"),
    "[0, ∞)": (r"\boxed{[0,\infty)}",),
    "3:4": (r"\boxed{3:4}", r"\boxed{3/4}"),
    "5m": (r"\boxed{5m}", r"\boxed{5 m}"),
}
UNEQUAL = {
    "50%": (
        r"\boxed{0.5\%}",
        r"\boxed{5000}",
        r"\boxed{5}",
        r"\boxed{0.05}",
        "The answer is 0.5%",
        "It is 51%.",
        r"\boxed{50\% \text{ or } 60\%}",
    ),
    "0.5%": (r"\boxed{50\%}", r"\boxed{50}"),
    "0.5": (r"\boxed{5\%}", r"\boxed{500\%}"),
    "5 cm": (r"\boxed{5\text{ m}}", r"\boxed{6 cm}", r"\boxed{5\text{ cm}^2}"),
    "5 m/s": (r"\boxed{5 \text{ km/h}}",),
    "1½": (r"\boxed{11/2}", r"\boxed{1/2}"),
    "1e5": (r"\boxed{5e}", r"\boxed{1000000}", r"\boxed{5}"),
    "x²": (r"\boxed{2x}", r"\boxed{x2}"),
    "10⁵": (r"\boxed{105}", r"\boxed{50}"),
    "1234": (r"\boxed{1.234}", r"\boxed{234}"),
    "-3": (r"\boxed{3}", "The answer is 3"),
    "½": (r"\boxed{12}", r"\boxed{2}"),
    "True": (r"\boxed{False}",),
}


def pairs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(answer, response) for answer, responses in table.items() for response in responses]


@pytest.mark.parametrize(("answer", "response"), pairs(EQUAL))
def test_what_a_reader_takes_for_equal(answer: str, response: str) -> None:
    assert is_correct(response, answer)


@pytest.mark.parametrize(("answer", "response"), pairs(UNEQUAL))
def test_what_a_reader_takes_for_different(answer: str, response: str) -> None:
    assert not is_correct(response, answer)


DIGITS = ("0123456789", "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "০১২৩৪৫৬৭৮৯")


@settings(max_examples=60)
@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(DIGITS),
    st.sampled_from(("{}", "{:,}", "{:_}", "{:e}")),
    st.booleans(),
)
def test_whole_numbers_as_python_writes_them(number: int, digits: str, form: str, percent: bool) -> None:
    written = form.format(number).replace("_", " ").translate(str.maketrans(DIGITS[0], digits))
    exact = int(float(f"{number:e}")) if form == "{:e}" else number
    sign = "%" if percent else ""
    assert is_correct(f"\\boxed{{{written}{sign}}}", f"{exact}{sign}")
    assert not is_correct(f"\\boxed{{{written}{sign}}}", f"{exact + max(1, abs(exact) // 100)}{sign}")


@settings(max_examples=60)
@given(st.integers(0, 99), st.integers(1, 98), st.integers(2, 99), st.booleans())
def test_mixed_numbers_are_sums(integer: int, above: int, below: int, negative: bool) -> None:
    if above >= below:
        return
    exact = (integer + Fraction(above, below)) * (-1 if negative else 1)
    sign = "-" if negative else ""
    written = [f"{sign}{integer} {above}/{below}", f"{sign}{integer}\\frac{{{above}}}{{{below}}}"] if integer else []
    for text in (*written, f"{exact.numerator}/{exact.denominator}"):
        assert is_correct(f"\\boxed{{{text}}}", str(exact)), text
        assert is_correct(f"\\boxed{{{exact}}}", text), text


PLAIN = (
    *(r"\frac{1}{2}", "0.5", "x+1", "1+x", r"\sqrt{8}", r"2\sqrt{2}", "(1,2)", r"\{1,2\}", "1,2", "x=3", "3", r"\pi/2"),
    *(
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"(-\infty,3)",
        "x<3",
        r"\text{(C)}",
        "C",
        r"2^{10}",
        "1024",
        "3+4i",
        "101_2",
    ),
)


def test_plain_latex_is_compared_as_math_verify_does() -> None:
    for answer in PLAIN:
        reference = parse(f"\\boxed{{{answer}}}")
        for response in PLAIN:
            expected = response == answer or verify(reference, parse(f"\\boxed{{{response}}}"))
            assert is_correct(f"\\boxed{{{response}}}", answer) is expected, (response, answer)


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "1 ",
        "1,",
        "1.",
        "½",
        "%",
        "1%",
        "\\text{ ",
        "\\text{",
        "1e9",
        "x²",
        "5 m",
        "√",
        "cm ",
        "1 1/",
        "9" * 99 + "e999",
    ],
)
def test_the_work_on_hostile_answers_is_bounded(unit: str) -> None:
    """Texts are cut before they are rewritten, and grow by a small factor at most."""
    text = unit * (200_000 // len(unit))
    assert len(rewrite_tail(text).as_share) < 40_000
    assert rewrite_answer(text).text == text, "a whole answer of this length is no number"
    assert len(rewrite_answer(text[:2000]).as_share) < 40_000
    assert len(rewrite_numbers("1e60 " * 400)) < 40_000


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("2 1/2", r"\boxed{21/2}"),
        ("2 1/2", "21/2"),
        ("1 3/4", r"\boxed{13/4}"),
        ("-2 1/2", r"\boxed{-21/2}"),
        ("3 1/3", r"\boxed{31/3}"),
        ("1 2 3", r"\boxed{123}"),
        ("1 2 3", r"\boxed{12 3}"),
        ("5 2", r"\boxed{52}"),
        ("10 000,5", r"\boxed{100005}"),
        ("yes", "No"),
    ],
)
def test_a_blank_between_numbers_is_not_nothing(reference: str, response: str) -> None:
    assert not is_correct(response, reference)


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("2.5", "It is 2 1/2."),
        ("10/3", r"\boxed{3 1/3}"),
        ("1000000", r"\boxed{1 000 000}"),
        ("10000.5", r"\boxed{10 000,5}"),
        ("(1, 2)", r"\boxed{(1,2)}"),
        ("x + y", r"\boxed{x+y}"),
        ("0.001", r"\boxed{10^-3}"),
        ("10^-3", r"\boxed{0.001}"),
        ("2^-1", r"\boxed{1/2}"),
        ("3^-2", r"\boxed{\frac{1}{9}}"),
        ("5", r"so it is $\boxed 5$."),
        ("1/2", r"$\boxed \frac{1}{2}$"),
        ("7", r"\fbox{7}"),
        ("no", "No"),
        ("Yes", "yes."),
        ("No", "The answer is **no**."),
    ],
)
def test_right_answers_as_they_are_written(reference: str, response: str) -> None:
    assert is_correct(response, reference)


def test_boxes_of_solutions() -> None:
    solutions = {
        r"so $\boxed 5$": "5",
        r"\fbox{7}": "7",
        r"$\boxed -3$, then $\boxed{": "-3",
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    }
    assert {text: find_last_box(text) for text in solutions} == solutions
