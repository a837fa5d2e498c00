"""Final answers: GSM8K's ####, letters of choices, answers before a long text, Markdown; and tiny numbers."""

import pytest

from megatron_grpo.environments.math_answers import is_correct

TAIL = " The reasoning above confirms that this result is consistent with the question." * 40


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("2+40=42\n#### 42\n", "42", True),
        ("2+40=42\n#### 42\n" + TAIL, "42", True),
        ("#### 42\n\nNote: 12 of them are red.", "42", True),
        ("#### 42\n\nNote: 12 of them are red.", "12", False),
        ("#### $1,072.00\n", "1072", True),
        ("#### 1/2", "0.5", True),
        ("#### 41\nNo.\n#### 42", "42", True),
        ("#### 41\nNo.\n#### 42", "41", False),
        # Markdown's headings are no answers.
        ("#### 2. Compute\nso the answer is 5", "5", True),
        ("#### Step 3\nThe answer is 5", "5", True),
        # A box comes first.
        ("#### 41\n\\boxed{42}", "42", True),
    ],
)
def test_a_number_behind_the_mark_of_gsm8k_is_the_answer(response: str, answer: str, is_right: bool) -> None:
    assert is_correct(response, answer) is is_right


@pytest.mark.parametrize("statement", ["The answer is 42.", "Final answer: 42.", "**Answer:** 42."])
def test_a_long_text_may_follow_the_answer(statement: str) -> None:
    assert is_correct(f"We add 2 and 40. {statement}{TAIL}", "42")
    assert not is_correct(f"We add 2 and 40. {statement}{TAIL}", "40")


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("The answer is B. Note that A is a common distractor.", "B", True),
        ("The answer is B. Note that A is a common distractor.", "A", False),
        ("The answer is C because I computed the integral.", "C", True),
        ("The answer is C because I computed the integral.", "I", False),
        ("**Answer: (B)**", "B", True),
        ("The correct answer is option B.", "(B)", True),
        ("Answer: A\nNo, it is worse.\nAnswer: D", "D", True),
        ("Answer: A\nNo, it is worse.\nAnswer: D", "A", False),
        ("The answer is a car.", "A", False),
        ("Answer: I think so", "I", False),
        ("The answer is N + 1", "N", False),
        ("The answer is N/A", "N", False),
        ("The answer is X, where X = 5", "5", True),
        ("\\boxed{B}, so the answer is C", "B", True),
        # Boxes around a choice and its text, and of the reasoning.
        ("\\boxed{B. 4}", "B", True),
        ("\\boxed{\\text{(B) } 4}", "B", True),
        ("\\boxed{(B)}", "(B)", True),
        ("\\boxed{\\langle H\\rangle \\ll \\Delta E}\n\n**Answer: D**", "D", True),
        ("\\boxed{\\langle H\\rangle \\ll \\Delta E}\n\n**Answer: D**", "E", False),
        ("\\boxed{A, B}", "A", False),
        ("\\boxed{AB}", "A", False),
        ("\\boxed{A and B}", "A", False),
    ],
)
def test_a_letter_behind_the_words_of_an_answer_is_the_choice(response: str, answer: str, is_right: bool) -> None:
    assert is_correct(response, answer) is is_right


@pytest.mark.parametrize("answer", ["**3/4**", "*3/4*", "__3/4__", "`3/4`", "**x = 3/4**", "**3/4**."])
def test_markdown_around_an_answer_is_no_part_of_it(answer: str) -> None:
    assert is_correct(f"So **a** is smaller.\n\n✅ Final Answer: {answer}", "3/4")
    assert not is_correct(f"So **a** is smaller.\n\n✅ Final Answer: {answer}", "4/3")


def test_powers_and_products_are_no_markdown() -> None:
    assert is_correct("The answer is 2**3", "8")
    assert is_correct("The answer is 2 * 3 * 4", "24")


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}", False),
        ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", False),
        ("10^{-20}", "10^{-21}", False),
        ("0.0000012", "0.0000013", False),
        ("-10^{-9}", "10^{-9}", False),
        ("\\frac{1}{2004!}", "\\frac{1}{2004!}", True),
        ("\\frac{1}{2^{98}}", "2^{-98}", True),
        ("1.2 \\times 10^{-6}", "0.0000012", True),
        ("6.62607e-34", "6.626 \\times 10^{-34}", True),
        ("0.000333", "\\frac{1}{3000}", True),
        ("0", "0.0", True),
        ("(10^{-20}, 1)", "(10^{-21}, 1)", False),
        ("(10^{-20}, 1)", "(1e-20, 1.0)", True),
        ("\\{10^{-20}, 3\\}", "\\{3, 10^{-21}\\}", False),
        ("\\{10^{-20}, 3\\}", "\\{3, \\frac{1}{10^{20}}\\}", True),
        ("[10^{-20}, \\infty)", "[10^{-21}, \\infty)", False),
        ("[10^{-20}, \\infty)", "[\\frac{1}{10^{20}}, \\infty)", True),
        ("x = 10^{-20}", "10^{-21}", False),
        ("x = 10^{-20}", "\\frac{1}{10^{20}}", True),
        ("\\begin{pmatrix}10^{-20}\\\\2\\end{pmatrix}", "\\begin{pmatrix}10^{-21}\\\\2\\end{pmatrix}", False),
    ],
)
def test_tiny_numbers_are_not_equal_because_both_are_nearly_zero(response: str, answer: str, is_right: bool) -> None:
    """math-verify rounds to six decimals."""
    assert is_correct(f"\\boxed{{{response}}}", answer) is is_right
