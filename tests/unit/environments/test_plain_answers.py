"""Answers that a library evaluates: harmless ones pass, others never reach it."""

import pytest

from megatron_grpo.environments.reasoning_gym import is_plain

PLAIN = """
42 | -7.5e3 | [1, 2] | {'a': (1, 2)} | {"a": true, "b": null} | x**2/2 + C | 2*x**(1/2) | 3*sin(x)/4 | (40 + 8)*2 - 6/3
1 2 3 | Q _ _ _ Q _ | ABBA | exp(-x)*x**n | (10**30)**100 | 0x1f | import os
"""
OTHERS = """
__import__('os').system('true') | open('/etc/passwd') | exit() | ().__class__ | oracle_answer | x.real | 2 .real
print(1) | lambda: 0 | [x for x in y] | f'{x}' | 'a' * 9 | sin(open) | __builtins__ | x if x else y | (y := 3) | S('x')
ｅｘｉｔ() | 9**9**9 | 10**101 | ((10**100)**100)**100 | 2**(100/(1/100)) | 99999! | 1234567890123456789012345678901 + 1
"""


def split(texts: str) -> list[str]:
    return [text.strip() for line in texts.strip().splitlines() for text in line.split(" | ")]


@pytest.mark.parametrize("answer", [*split(PLAIN), "", "Q _\n_ Q"])
def test_plain_answers(answer: str) -> None:
    assert is_plain(answer)


@pytest.mark.parametrize("answer", [*split(OTHERS), "1" * 1001])
def test_other_answers(answer: str) -> None:
    assert not is_plain(answer)
