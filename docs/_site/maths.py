"""Equations as MathML, which browsers draw by themselves: no script, no font, no request."""

from __future__ import annotations

import html as htmllib
import re

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def render(html: str) -> str:
    """A page with its TeX turned to MathML."""
    if "arithmatex" not in html:
        return html
    from latex2mathml.converter import convert

    html = INLINE.sub(lambda m: convert(htmllib.unescape(m[1]).strip()), html)
    return BLOCK.sub(
        lambda m: f'<div class="equation">{convert(htmllib.unescape(m[1]).strip(), display="block")}</div>',
        html,
    )


LETTER = re.compile(r"(<(code|pre|math)\b.*?</\2>)|([ημβ])_([a-zA-Z0-9]+)", re.S)


def subscripts(html: str) -> str:
    """`η_c` as people write it, outside code.

    >>> subscripts("η_c is <code>η_c</code>")
    'η<sub>c</sub> is <code>η_c</code>'
    """
    return LETTER.sub(lambda m: m[1] or f"{m[3]}<sub>{m[4]}</sub>", html)
