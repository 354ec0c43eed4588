r"""One spelling of an answer before math-verify reads it: ``\bigl(1,~\sfrac12\bigr)`` becomes ``(1, \frac{1}{2})``.

Also of repeating decimals, mixed numbers and Unicode; prose stays as it is, apart from such formulas in it.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_SIGNS = str.maketrans(
    {
        "\u00d7": "\\times ", "\u00f7": "/", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u03c0": "\\pi ",
        "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ",
        "\u222a": "\\cup ", "\u2229": "\\cap ", "\u00b1": "\\pm ", "\u00b0": "^{\\circ}", "\u2208": "\\in ",
        "\u2205": "\\emptyset ", "\u27e8": "(", "\u27e9": ")", "\u2044": "/", "\u2026": "...",
        "\u221a": "\\sqrt", "\u221b": "\\sqrt[3]", "\u221c": "\\sqrt[4]",
    }
)  # fmt: skip
_COMMANDS = {
    **dict.fromkeys(("~", "\\ ", "\\,", "\\;", "\\:", "\\>", "\\quad", "\\qquad", "\\thinspace", "\\enspace"), " "),
    **dict.fromkeys(("\\mathopen", "\\mathclose", "\\mathord", "\\mathstrut", "\\!", "\\/", "\\rm", "\\bm"), ""),
    **dict.fromkeys(("\\displaystyle", "\\textstyle", "\\limits", "\\ensuremath", "\\underline", "\\boldsymbol"), ""),
    **dict.fromkeys(("\\sfrac", "\\nicefrac", "\\tfrac", "\\dfrac", "\\cfrac"), "\\frac"), "\\surd": "\\sqrt",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")", "\\lbrack": "[", "\\rbrack": "]",
    "\\dbinom": "\\binom", "\\tbinom": "\\binom", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\imath": "i",
    "\\varnothing": "\\emptyset", "\\degree": "^{\\circ}", "\\textdegree": "^{\\circ}", "\\bar": "\\overline",
}  # fmt: skip
_COMMAND = re.compile(r"\\\\|\\[a-zA-Z]+|\\.|~", re.DOTALL)
_SMALL = re.compile(r"([\u2070-\u207e\u00b2\u00b3\u00b9]+)|([\u2080-\u208e]+)|([\u00bc-\u00be\u2150-\u215e])")
_ROOT = re.compile(r"([\u221a-\u221c])\s?(?:\(([^()]{1,80})\)|(\w+))")
_DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|,?\\[!,:;]|,\\ )\s?(?=\d{3})")
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|gcd|lcm|max|min|det"
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_BARE = r"(\\(?!frac|sqrt|binom|left|text|math)[a-zA-Z]+|[^\W_])"
_FONT = r"\\(?:operatorname\*?|math(?:rm|it|sf|bf)|text(?:rm|it|bf)?|rm)"
_DOTS = r"\s?(?:\.\.\.|\\[lc]?dots(?![a-z]))"
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[hv]?(?:space|phantom)\*?\s?\{[^{}]*\}", " "),
        (
            r"\\(?:text)?color\s?\{[^{}]*\}|\\math(?:bf|rm)\s?(?=\{\s?\\)|\\(?:left|right)\s?\.|\\[bB]igg?[lrm]?(?![a-zA-Z])\s?",
            "",
        ),
        (r"\\(left|right)\s+(?=\S)", r"\\\1"),
        (rf"{_FONT}\s?\{{\s?({_FUNCTIONS})\s?\}}", r"\\\1 "),
        (r"\\(?:operatorname|mathrm|mathit)\s?(?:\{\s?([ei]|\\pi)\s?\}|([ei])(?![a-zA-Z]))", r"{\1\2}"),
        (rf"{_FONT}\s?\{{\s?([-+]?[\d.,]*\d)\s?\}}", r"\1"),
        (r"(?:\\(?:text|mathrm|mbox))?(?<!\\)\{\s?([()\[\]]?)\s?\}", r"\1"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (rf"\\frac\s*{_BARE}", r"\\frac{\1}"),
        *[(rf"(\\frac\s*{_BRACED})\s*{_BARE}", r"\1{\2}")] * 2,
        (rf"\\sqrt\s*(\[[^\[\]]*\])?\s*{_BARE}", r"\\sqrt\1{\2}"),
        (r"\\sqrt\s+(?=[\[{])", r"\\sqrt"),
        (rf"\^\s*(\\frac{_BRACED}{_BRACED})", r"^{\1}"),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"(?<=\d)\$\s?(?:\\?%|percent(?:age)?|pct)", "%$"),
        (r"(?<=[\d}])\s?(?:\\%|\\text\s?\{\s?(?:percent|\\?%)\s?\}|(?:percent(?:age)?|pct)\b)", "%"),
        (r"\^\s?\{?\s?\\circ\s?\}?|(?<=\d)\s?(?:\\text\s?\{\s?degrees?\s?\}|degrees?\b)", r"^{\\circ}"),
        (r"\\dot\s?\{?(\d)\}?(?:(\d*)\\dot\s?\{?(\d)\}?)?", r"\\overline{\1\2\3}"),
        (r"(?<=\.)(\d{0,40})\((\d{1,40})\)(?!\d)", r"\1\\overline{\2}"),
        (rf"(\.\d{{0,40}}?)(\d{{1,20}}?)\2{{1,40}}{_DOTS}", r"\1\\overline{\2}"),
        (rf"(?<=\.)(\d+){_DOTS}", r"\1"),
    )
]
_REPEATING = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\overline\s?\{?(\d{1,40})\}?")
_GROUPED = re.compile(r"(?<![\d.,] )(?<![\d.])\d{1,3}(?: \d{3})+(?![\d/]| ?/)")
_MIXED = re.compile(
    r"(?<![\w.^}\\])(\d{1,9})(?:\s+(\d{1,9})\s?/\s?(\d{1,9})|\s?\\frac\{(\d{1,9})\}\{(\d{1,9})\})(?!\d|\.\d)"
)
_PERCENT = re.compile(r"(\\frac\{\d+\}\{\d+\}|\d[\d,]*(?:\.\d+)?|\.\d+)\s?%")
_DEGREES = re.compile(
    r"(\\frac\{\d+\}\{\d+\}|\d+(?:\.\d+)?)\s?\^\{\\circ\}(?!\s*(?:\\?(?:text|mathrm)\s?\{)?\s?[CF]\b)"
)
_WHOLE = re.compile(r"\W*\d{2,}\W*")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)e([-+]?\d{1,4})")
_BASED = re.compile(r"(?<!\w)(\d+)_\s?(?:\{\s?(\d{1,2})\s?\}|(\d))")


def normalised(text: str) -> str:
    """Return the text with one spelling for what has several."""
    text = _ROOT.sub(r"\1{\2\3}", _SMALL.sub(_in_tex, text)).translate(_SIGNS)
    text = _COMMAND.sub(lambda command: _COMMANDS.get(command[0], command[0]), _DIGIT_GROUP.sub(",", text))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _MIXED.sub(_improper, _REPEATING.sub(_fraction, text))
    return _GROUPED.sub(lambda number: number[0].replace(" ", ""), text)


def readings(text: str, other: str) -> list[str]:
    """Return the normalised text as it may be read next to another: a sign that the other lacks may be left out.

    So 25% is read as 25 and as 1/4, and 30 degrees as 30 and as pi/6. Next to 0.25% it is 25 only. A whole number of
    two digits is no proportion: 5000% is not 50.
    """
    texts = [text]
    for sign, value in ((_PERCENT, r"\\frac{\1}{100}"), (_DEGREES, r"\\frac{\1\\pi}{180}")):
        alone = not sign.search(other) and not (sign is _PERCENT and _WHOLE.fullmatch(other))
        texts = list(dict.fromkeys(sign.sub(form, each) for form in (r"\1", value)[: 1 + alone] for each in texts))
    if _SCIENTIFIC.fullmatch(text):
        texts.append(_SCIENTIFIC.sub(r"\1\\times 10^{\2}", text))
    if _BASED.search(text) and _BASED.search(other):  # the parser ignores the base of a number
        texts = [_BASED.sub(r"\1\\cdot\\beta_{\2\3}", each) for each in texts]
    return texts


def _in_tex(small: re.Match[str]) -> str:
    plain = unicodedata.normalize("NFKC", small[0]).replace("\u2212", "-")
    return "\\frac{{{}}}{{{}}}".format(*plain.split("\u2044")) if small[3] else f"{'^' if small[1] else '_'}{{{plain}}}"


def _fraction(repeating: re.Match[str]) -> str:
    whole, fixed, period = repeating.groups()
    value = (int("0" + whole + fixed) + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _improper(mixed: re.Match[str]) -> str:
    whole, upper, lower = (int(number) for number in mixed.groups() if number)
    return f"\\frac{{{whole * lower + upper}}}{{{lower}}}" if 0 < upper < lower else mixed[0]
