"""Equations as MathML, which browsers draw by themselves: no script, no font, no request."""

from __future__ import annotations

import html as htmllib
import re

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)

# few fonts have a bar that grows: extra.css draws it
OVERLINE = ('<mo accent="true">&#x02015;</mo>', '<mo class="bar">&#x000AF;</mo>')


def render(html: str) -> str:
    """A page with its TeX turned to MathML."""
    if "arithmatex" not in html:
        return html
    from latex2mathml.converter import convert

    def drawn(tex: str, display: str) -> str:
        made = convert(htmllib.unescape(tex).strip(), display=display)
        return made.replace(*OVERLINE)

    html = INLINE.sub(lambda m: drawn(m[1], "inline"), html)
    return BLOCK.sub(lambda m: f'<div class="equation">{drawn(m[1], "block")}</div>', html)


CELL = re.compile(r"<td\b.*?</td>", re.S)
MEASURE = re.compile(r"<code\b.*?</code>|(?<=\d) (?:± (?=\d)|(?:%|[kMG]?B|[mµ]?s|[kMG])(?!\w))", re.S)


def measures(html: str) -> str:
    r"""A table's figures in one piece: they do not break at their spaces.

    >>> measures("<td>91.7 ± 0.5 in 494 kB</td>")
    '<td>91.7\xa0±\xa00.5 in 494\xa0kB</td>'
    """

    def whole(m: re.Match[str]) -> str:
        return m[0] if m[0].startswith("<") else m[0].replace(" ", "\xa0")

    return CELL.sub(lambda cell: MEASURE.sub(whole, cell[0]), html)


LETTER = re.compile(r"(<(code|pre|math)\b.*?</\2>)|([ημβ])_([a-zA-Z0-9]+)", re.S)


def subscripts(html: str) -> str:
    """`η_c` as people write it, outside code.

    >>> subscripts("η_c is <code>η_c</code>")
    'η<sub>c</sub> is <code>η_c</code>'
    """
    return LETTER.sub(lambda m: m[1] or f"{m[3]}<sub>{m[4]}</sub>", html)
