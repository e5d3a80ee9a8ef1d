"""The math scorer, row by row. `math_rule` runs here in the main thread; test_reward_pool.py covers processes."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward.math.candidate import by_rules
from trainer.reward.math.clean import clean
from trainer.reward.math.compare import equal
from trainer.reward.math.numbers import parse_number
from trainer.reward.math_rule import MathRule

DATA = Path(__file__).parents[2] / "../shared/data"


def math_row(gold: str) -> Row:
    return Row("1", "math_rule", "math_rule", (Message("user", "?"),), ground_truth=gold)


BOXED = [  # content of the answer's box, reference, right
    (r"\frac{1}{2}", r"\frac{1}{3}", 0),
    (r"\frac12", "0.5", 1),
    ("0.333", r"\frac{1}{3}", 0),
    ("0.333333", r"\frac{1}{3}", 1),
    ("0.666666", r"\frac{2}{3}", 0),
    ("0.666667", r"\frac{2}{3}", 1),
    (r"50\%", "0.5", 1),
    (r"50\%", "50", 1),
    ("12.5", r"12.5\%", 1),
    ("0.5", "50", 0),
    (r"0.5\%", "0.5", 0),
    ("1,234", "1234", 1),
    ("1,23", "123", 0),
    (r"1\,200", "1200", 1),
    ("12.", "12", 1),
    ("1e6", "1000000", 1),
    (r"1\times10^6", "1000000", 1),
    (r"3\frac12", r"\frac{7}{2}", 1),
    ("3½", "7/2", 1),
    ("３", "3", 1),
    ("−5", "-5", 1),
    ("007", "7", 1),
    ("7.00000001", "7", 0),
    (r"0.\overline{3}", "1/3", 1),
    (r"0.1\overline{6}", r"\frac16", 1),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", 0),
    ("1/2006!", "1/2004!", 0),
    ("1-1/e", "1+1/e", 0),
    ("x=5", "5", 1),
    ("5=x", "5", 1),
    ("x=2+3=5", "5", 1),
    ("5", "x=5", 1),
    ("y=5", "x=5", 0),
    ("f(x)=x+1", "x+1", 1),
    (r"x\in(1,2)", "(1,2)", 1),
    (r"5\text{ cm}", "5", 1),
    (r"5\text{ m}", r"5\text{ cm}", 0),
    (r"5\text{ cm}", r"5\mathrm{cm}", 1),
    ("7 days", "7", 1),
    (r"90^\circ", "90", 1),
    ("21", "1", 0),
    ("B) 12", "B", 1),
    ("A or B", "B", 0),
    (r"\text{E}", "E", 1),
    ("(1,4.5)", r"(1,\frac92)", 1),
    ("2,1", "(1,2)", 0),
    ("1,2", "(1,2)", 1),
    ("3,2,1", "1,2,3", 1),
    ("2,1", "a=1,b=2", 0),
    ("x=5,y=2", "2", 0),
    ("x=(1,2)", "(1,2)", 1),
    ("1,2", "x=1,2", 1),
    ("b=2,a=1", "a=1,b=2", 1),
    ("b=1,a=2", "a=1,b=2", 0),
    (r"x=1\text{ or }x=-2", "1,-2", 1),
    (r"1-\sqrt{19},1+\sqrt{19}", r"1\pm\sqrt{19}", 1),
    (r"\{2,1\}", "1,2", 1),
    (r"x\le 3", r"(-\infty,3]", 1),
    ("[1,2]", "[1,2)", 0),
    (r"(5,\infty)\cup(-\infty,3)", r"(-\infty,3)\cup(5,\infty)", 1),
    (r"\sqrt{12}", r"2\sqrt{3}", 1),
    ("(x+1)^2", "x^2+2x+1", 1),
    ("(a+b)^2", "a^2+b^2", 0),
    ("3*x-1*y+13=0", "3x+4y+14=0", 0),
    (r"3\text{ or }5", "3", 0),
    (r"\pm 3", "3", 0),
    ("evil", "live", 0),
    (r"\text{monday}", r"\text{Monday}", 1),
    ("Monday", r"\text{Monday}", 1),
    ("1011_3", "1011_2", 0),
    ("1011", "1011_2", 1),
    ("1011_2", "1011", 0),
    (r"-\frac{1}{2}", "-0.5", 1),
    ("p-q", "p - q", 1),
    ("1{,}234", "1,234", 1),
    (r"\begin{bmatrix}-\frac13\\\frac23\end{bmatrix}", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", 1),
    (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 0),
    ("June 20", r"\text{June 20}", 1),
    ("2<x<5", "(2,5)", 1),
    (r"11\text{ m}", r"11\text{ m}^2", 0),
    ("52_{10}", "52_8", 0),
    (r"(3,4),(1,2)", "(1,2),(3,4)", 1),
    (r"(2,1),(3,4)", "(1,2),(3,4)", 0),
    ("y=3+2x", "y=2x+3", 1),
    ("4x+6y=10", "2x+3y=5", 1),
    ("6.28", r"2\pi", 0),
    (r"90^\circ", r"\frac{\pi}{2}", 0),
]
WHOLE = [  # the whole response, reference, right
    (r"First \boxed{5}, then \boxed{7}.", "5", 0),
    (r"\boxed{\boxed{5}}", "5", 1),
    (r"\boxed 5", "5", 1),
    (r"\fbox{5}", "5", 1),
    (r"so it is \boxed{5", "5", 0),
    (r"\boxed{5} or rather \boxed{5", "5", 0),
    (r"\boxed{}", "0", 0),
    (r"\boxed{5\}", "5", 0),
    (r"<think>\boxed{5}</think>So \boxed{7}.", "5", 0),
    ("<think>maybe 7</think>The answer is 5.", "5", 1),
    (r"<think>so \boxed{5}", "5", 0),
    ("We get 40 and 32.\n#### 72", "72", 1),
    ("Here 5 looks right, maybe 7.", "5", 0),
    ("It is long.\n**Answer:** $\\frac{1}{2}$.", "0.5", 1),
    ("72", "40 + 32 = 72 eggs\n#### 72", 1),
    (r"\boxed{\{1,2\}}", "1,2", 1),
]


@pytest.mark.parametrize(("content", "gold", "right"), BOXED)
def test_boxed_answers(content, gold, right):
    result = MathRule()(f"So we get $\\boxed{{{content}}}$.", math_row(gold))
    assert (result.acc, result.score) == (right, right), result


@pytest.mark.parametrize(("text", "gold", "right"), WHOLE)
def test_whole_responses(text, gold, right):
    assert MathRule()(text, math_row(gold)).acc == right


def test_a_right_box_of_150_characters():
    long_sum = "+".join(["1"] * 75) + "+0"
    assert len(long_sum) > 150
    assert MathRule()(f"\\boxed{{{long_sum}}}", math_row("75")).acc == 1


def sample_rows():
    if not DATA.is_dir():
        return []
    names = ("deepmath_int_64.jsonl", "math500_aime_60.jsonl")
    return [json.loads(line) for name in names for line in (DATA / name).read_text("utf-8").splitlines()]


def test_boxed_reference_is_right_for_every_sample_row():
    rows = sample_rows()
    if not rows:
        pytest.skip("the sample data is not beside this checkout")
    wrong = [
        r["ground_truth"]
        for r in rows
        if not MathRule()(f"\\boxed{{{r['ground_truth']}}}", math_row(r["ground_truth"])).acc
    ]
    assert len(rows) == 124 and wrong == []


@pytest.mark.parametrize(
    ("text", "gold", "acc", "reason"),
    [
        ("3 + 4 = 7", "7", 1, "correct"),
        ("The answer is 12.", "12", 1, "correct"),
        ("no idea", "7", 0, "no_answer"),
        ("", "7", 0, "no_answer"),
        ("it costs 1,234.50 in all", "1234.5", 1, "correct"),
        ("7-3", "3", 1, "correct"),
        ("7 - 3", "3", 1, "correct"),
        ("x = -3", "-3", 1, "correct"),
        ("= -3", "-3", 1, "correct"),
        ("(-3)", "-3", 1, "correct"),
        ("-3", "-3", 1, "correct"),
        ("costs \u22123 or -.5", "-0.5", 1, "correct"),
        ("7, then 8", "7", 0, "wrong"),
        ("<think>7</think>none", "7", 0, "no_answer"),
        ("<think>7", "7", 0, "think_unclosed"),
    ],
)
def test_last_number(text, gold, acc, reason):
    result = MathRule(answer="last_number")(text, math_row(gold))
    assert (result.acc, result.reason) == (acc, reason)


def test_reasons_and_prediction():
    assert MathRule()(r"\boxed{\dfrac12}", math_row("0.5")).pred == r"\frac12"
    assert MathRule()("nothing to see here\nat all", math_row("5")).reason == "no_answer"
    assert MathRule(require_box=True)("#### 5", math_row("5")).reason == "no_answer"
    assert MathRule()("5", math_row("5"), think_open=True).reason == "think_unclosed"
    assert MathRule()("7</think>5", math_row("5"), think_open=True).acc == 1


def test_numbers_are_exact():
    assert parse_number("1,234,567.5").value == Fraction("1234567.5")
    assert parse_number("2.5\\times 10^{-3}").value == Fraction(1, 400)
    assert parse_number("0.\\overline{142857}").value == Fraction(1, 7)
    assert parse_number("-3\\frac{1}{2}").value == Fraction(-7, 2)
    assert parse_number("1,23") is None and parse_number("x") is None and parse_number("1/0") is None


def test_escaped_braces_do_not_close_a_box():
    assert by_rules(r"\boxed{a\}b}", require_box=False) == r"a\}b"
    assert by_rules(r"\boxed{a\}", require_box=False) is None


def test_cleaning():
    assert clean(r"$\left( 3, \dfrac{\pi}{2} \right)$.") == r"(3,\frac{\pi}{2})"
    assert clean("5²") == "5^{2}"
    assert clean(r"\(x\)") == "x"
    assert not equal("", "") and not equal("5", "")


def test_the_scorer_needs_no_device_library():
    code = "import sys, trainer.reward.worker, trainer.reward.math_rule as m; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    loaded = set(run.stdout.split())
    assert "sympy" in loaded, run.stderr
    assert not loaded & {"torch", "torch_npu", "transformers", "ray", "numpy"}
