"""Answers that would keep sympy busy for seconds, minutes or for good, if it were asked."""

from __future__ import annotations


def nested(opening: str, inner: str, closing: str, count: int) -> str:
    """``inner`` in so many brackets."""
    return opening * count + inner + closing * count


def joined(part: str, count: int, sign: str = "") -> str:
    """The part so many times."""
    return sign.join([part] * count)


REFUSED = [
    # factorials
    *(r"(10^{6})!", r"10^{6}!", "1000000!", "(999999)!", "(999 \\cdot 999)!", "(10^3+9^4)!", r"\left(10^{6}\right)!"),
    *("5!!!!", "7!!", "100!!!", "(3!)!!", "(7!)!", "((4!)!)!"),
    *("(n+10^6)!", "(0 \\cdot n+99999)!", "(2^{2^{5}})!", "9999!"),
    *(r"\frac{10^{5}!}{10^{4}!}", r"\sqrt{100000!}"),
    *(r"\binom{100000!}{3}", "(-10^6)!"),
    *(r"\log(1000000!)", r"\sin(1000000!)", "1000000!+1000000!", r"\frac{(10^5)!}{x}", "x^{100000!}"),
    *(r"\lfloor 10^{10^{9}} \rfloor", r"\lfloor 99999! \rfloor"),
    *(r"\det\begin{pmatrix}9^{9^9}&1\\1&2\end{pmatrix}", r"\{9^{9^9},1\}", r"[1,9^{9^9}]", "x=9^{9^9}", "x<10^{6}!"),
    # powers
    *("9^{9^{9^{9}}}", "9^{9^{9}}", "10^{10^{10}}", "2^{2^{2^{2^{2}}}}", "2^{10^{9}}", "(2^{1000})^{1000}"),
    *("2^{100000}", "10^{99999}", "3^{-10^{8}}", "(1/2)^{10^{8}}", r"\left(\frac{2}{3}\right)^{10^{7}}", "7^{10^{20}}"),
    *("1E+99999", "1E-99999", "x+2E+99999", "(x+1)^{10^{6}}", "(1+\\sqrt{2})^{10^{6}}", "2^{1000!}"),
    *(r"\sqrt[10^{9}]{2}" + "^{10^{18}}", "i^{10^{99}}", "(1+i)^{10^{7}}"),
    *(r"\pi^{\pi^{\pi^{\pi^{\pi}}}}", "2^{2^{x+99}}"),
    *("1.0000001^{10^{12}}", "x^{10^{10}!}", "10^{-10^{9}}", "0.5^{10^{8}}"),
    # depth
    *(nested(r"\sqrt[3]{1+", "2", "}", n) for n in (20, 30)),
    *(nested("(", "1", ")", n) for n in (20, 60, 200)),
    *(nested("x^{", "2", "}", n) for n in (9, 20, 60)),
    *(nested(r"\frac{1}{1+", "2", "}", n) for n in (20, 30)),
    nested(r"\left(", "1", r"\right)", 20),
    *(nested("[", "1", "]", 20), nested("\\{", "1", "\\}", 20), nested("{", "1", "}", 190)),
    # length
    *(joined("x+1", 200, "+"), ",".join(map(str, range(260)))),
]
"""Beyond a bound: each is unparsable, without having been computed."""

COSTLY = [
    *(r"\binom{10^{6}}{500000}", r"\dbinom{99999}{9999}", r"\gcd(2^{10^{9}},3)", r"\gcd(1000000!,7)"),
    *("(x+1)^{1000}", "(x+y+z)^{99}", "(a+b+c+d)^{30}", "((x+1)^{30}+1)^{30}", "(x+1)^{20}(y+1)^{40}"),
    *("2^{2019}-1", "(1+x)^{100}", "x^{2020}", "3000!", "10^{9999}", "1E+9999", joined("x", 399), joined("1", 30, "<")),
    *(r"\exp(\exp(\exp(99)))", "e^{e^{e^{e^{9}}}}"),
    *(nested(r"\sin(\cos(", "x", "))", n) for n in (3, 4, 6)),
    *(nested(rf"\{name}(", "x", ")", 8) for name in ("sin", "tan", "log", "ln", "exp", "cos", "arctan", "sinh")),
    *(nested(rf"\{name}(", "1", ")", 12) for name in ("sin", "tan", "log", "exp")),
    *(joined(rf"\sin({n}x)\cos({n}y)", 4, "+") for n in (2, 7)),
    *(joined(r"\tan(x)", 8, "+"), joined(r"\log(x+1)", 20, "+"), joined(r"\sin x", 50)),
    *(nested(r"\sqrt{1+", "2", "}", 9), joined(r"\sqrt{97}", 20, "+")),
    "+".join(rf"\sqrt{{{n}}}" for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)),
    *(nested("(", "1", ")", 16), nested("|", "x", "|", 20), nested("|", "x", "|", 100)),
    *(r"\int_0^1 e^{x^2} dx", r"\int \frac{\sin x}{x} dx", r"\int_0^{\infty} \frac{x^3}{e^x-1} dx", r"\int x^x dx"),
    *(r"\sum_{k=1}^{10^{6}} k^k", r"\sum_{k=1}^{\infty} \frac{1}{k^3}", r"\prod_{k=1}^{10^5} k"),
    r"\sum_{k=1}^{9999} k!",
    *(r"\lim_{x \to 0} \frac{\sin x}{x}", r"\frac{d}{dx} x^x", r"\sum_{i=1}^{9}\sum_{j=1}^{n} i"),
    "=".join(f"x^{n}" for n in range(10, 85)),
    rf"\{{{','.join(f'x_{{{n}}}' for n in range(45))}\}}",
    ",".join(f"a_{n}" for n in range(45)),
]
"""Within the bounds: some take too long to compare and are stopped."""

ACCEPTED = [
    *("+7", r"\sum_{k=1}^{n} k", r"\sum_{i=0}^{n} x_i", r"\sum_{k=0}^{\infty} \frac{1}{2^k}"),
    *(r"\binom{N}{2}", r"\gcd(2^3,12)"),
    *("2024!", r"\binom{2024}{3}", ",".join(f"x_{{{n}}}={n}" for n in range(1, 14)), r"\int_0^1 x dx"),
    *("6", r"\frac{3}{4}", r"\frac{\sqrt{3}}{2}", "2^{2019}-1"),
    *("3^{2020}", "10!", "100!", r"\binom{50}{25}", "n!", "(n+1)!"),
    *("(x+1)^{10}", "(x+y)^{8}", "(1+x)^{100}", r"\sin x+\cos x"),
    *(r"\frac{1}{2}\log_2 3", r"\sqrt{2+\sqrt{3}}", "x^{2020}"),
    *("[1,2)\\cup(3,\\infty)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "x=3,y=4", "(1,2,3)", "2x+3y=7", "1,2,3,4,5,6"),
    *(r"\sum_{k=1}^{10} k", r"e^{i\pi/3}", "-1+2i", "|x-3|"),
    *(r"\sqrt[3]{2}", r"20\%", "1.5e3", r"\frac{-1\pm\sqrt{5}}{2}"),
    *("x^2+2x+1", "(x-1)(x-2)(x-3)", r"\cos\left(\frac{2\pi}{7}\right)", r"\frac{10!}{3!4!3!}", "2^{10}3^{5}5^{2}"),
]
"""Within all bounds: they are compared."""
