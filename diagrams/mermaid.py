"""A table as a Mermaid state diagram, for pages that draw such text themselves.

Mermaid is forgiving where it should not be, so this emitter keeps away from whatever it misreads in silence:
a semicolon ends a label, ``linkStyle`` is taken for a state, a title must be a key of its own front matter.
Names that hold such characters get look-alikes. Moves have no colours here, only states do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .model import TROUBLE, Edge, Label, Model, Node
from .overlay import Trace

__all__ = ["mermaid"]

_CLASSES = (
    "classDef trouble fill:#fff5f3,stroke:#cf6a5c,color:#1d2733",
    "classDef taken fill:#eef3ff,stroke:#1546c0,stroke-width:3px,color:#1d2733",
)

# Each character on the left means something to Mermaid, or to the HTML and Markdown it makes of a label.
_ALIKE = str.maketrans(
    {
        ";": ",",
        ":": "\N{RATIO}",
        "#": "\N{FULLWIDTH NUMBER SIGN}",
        "%": "\N{FULLWIDTH PERCENT SIGN}",
        "$": "\N{FULLWIDTH DOLLAR SIGN}",
        "&": "\N{FULLWIDTH AMPERSAND}",
        "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
        ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
        '"': "'",
        "`": "'",
        "*": "\N{ASTERISK OPERATOR}",
        "\\": "\N{FULLWIDTH REVERSE SOLIDUS}",
        "{": "(",
        "}": ")",
    }
)
_DIRECTION = re.compile(r"(direction)\s+(?=TB|BT|RL|LR)", re.IGNORECASE)
"""Wherever these two words stand in a line, Mermaid takes the line for an order to itself."""

# fmt: off
_RESERVED = frozenset({
    "accdescr", "acctitle", "as", "choice", "class", "classdef", "click", "default", "direction", "end",
    "fork", "hide", "href", "join", "note", "scale", "state", "statediagram", "style",
})
# fmt: on


def mermaid(model: Model, trace: Trace | None = None) -> str:
    """The text of a ``stateDiagram-v2``."""
    names = _identifiers(model)
    title = trace.summary if trace else model.name
    lines = ["---", f"title: {_quoted(title)}", "---", "stateDiagram-v2"]
    lines += [f"    {line}" for line in _body(model, names, trace)]
    return "\n".join((*lines, ""))


def _body(model: Model, names: dict[str, str], trace: Trace | None) -> Iterator[str]:
    yield from _CLASSES
    yield from (f"[*] --> {names[node.name]}" for node in model.nodes if node.start)
    for node in model.nodes:
        yield from (f"{names[node.name]} : {_safe(line)}" for line in _inside(node, trace))
    for edge in model.edges:
        said = "<br/>".join(map(_safe, _beside(edge, trace)))
        yield f"{names[edge.source]} --> {names[edge.target]} : {said}"
    yield from (f"{names[node.name]} --> [*]" for node in model.nodes if node.final)
    yield from (f"class {names[name]} {kind}" for name, kind in _marked(model, trace))


def _inside(node: Node, trace: Trace | None) -> Iterator[str]:
    """The lines of a state; Mermaid draws the first one as its heading."""
    yield node.name
    if trace and trace.time_in(node.name):
        yield trace.time_in(node.name)
    yield node.sentence
    if node.entry:
        yield f"enter / {node.entry}"
    yield from (_row(label, trace) for label in node.stays)


def _beside(edge: Edge, trace: Trace | None) -> Iterator[str]:
    """The lines of a move."""
    for step in trace.on(edge.ends) if trace else ():
        yield f"({step.number}) {step.caption}".strip()
    yield from (_row(label, trace) for label in edge.labels)


def _row(label: Label, trace: Trace | None) -> str:
    times = trace.times(label.number) if trace else 0
    return f"{label} \N{MULTIPLICATION SIGN}{times}" if times else str(label)


def _marked(model: Model, trace: Trace | None) -> Iterator[tuple[str, str]]:
    for node in model.nodes:
        if trace and node.name in trace.visited:
            yield node.name, "taken"
        elif node.name in TROUBLE:
            yield node.name, "trouble"


def _identifiers(model: Model) -> dict[str, str]:
    """For each state its own name where Mermaid reads that as one word, else another that nobody has."""
    found: dict[str, str] = {}
    for at, node in enumerate(model.nodes):
        name = node.name
        plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in _RESERVED
        found[name] = name if plain else f"state_{at}"
        while not plain and found[name] in {other.name for other in model.nodes}:
            found[name] += "_"
    return found


def _safe(text: str) -> str:
    return _DIRECTION.sub(r"\1-", text.translate(_ALIKE))


def _quoted(text: str) -> str:
    """A value in YAML, which reads a bare colon as one more key."""
    return f'"{_safe(text)}"' if re.search(r"[^\w -]", text) else text
