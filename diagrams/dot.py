"""A table in the language of Graphviz, for those who want to lay it out anew or to go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .model import TROUBLE, Edge, Label, Model, Node
from .overlay import Trace

__all__ = ["dot"]

_HEAD = """\
  graph [bgcolor="white", fontname="Helvetica", fontsize=20, labelloc="t", nodesep=0.6, ranksep=0.5, pad=0.3];
  node [fontname="Helvetica", fontsize=11, shape="plain"];
  edge [color="#75828f", fontname="Courier", fontsize=10];
  "[*]" [label="", shape="point", width=0.16];"""

_TAKEN = "#1546c0"
_BAD = "#c8402e"


def dot(model: Model, trace: Trace | None = None) -> str:
    """The text of a ``digraph``."""
    title = f"{model.name}\n{trace.summary}" if trace else model.name
    lines = [f"digraph {_quoted(model.name)} {{", _HEAD, f"  label={_quoted(title)};"]
    lines += [_node(node, trace) for node in model.nodes]
    lines += [f'  "[*]" -> {_quoted(node.name)};' for node in model.nodes if node.start]
    lines += [_edge(edge, trace) for edge in model.edges]
    return "\n".join((*lines, "}", ""))


def _node(node: Node, trace: Trace | None) -> str:
    """A state as a small table: its name, its entry order, and under a line what does not leave it."""
    fill, line = ("#fff5f3", "#cf6a5c") if node.name in TROUBLE else ("#f6f8fa", "#8996a5")
    taken = trace is not None and node.name in trace.visited
    if trace:
        line = _TAKEN if taken else "#dde2e7"
    who = "".join(f'<TR><TD ALIGN="LEFT">{said}</TD></TR>' for said in _identity(node, trace))
    rows = "".join(_stay(label, trace) for label in node.stays)
    inner = f'<HR/><TR><TD BALIGN="LEFT" ALIGN="LEFT">{rows}</TD></TR>' if rows else ""
    style = f'BGCOLOR="{fill}" COLOR="{line}" BORDER="{3 if taken else 1}"'
    shape = f'STYLE="ROUNDED" CELLBORDER="0" CELLSPACING="2" CELLPADDING="2" {style}'
    rim = f', peripheries=1, style="rounded", margin=0.05, shape="box", color="{line}"' if node.final else ""
    return f"  {_quoted(node.name)} [label=<<TABLE {shape}>{who}{inner}</TABLE>>{rim}];"


def _identity(node: Node, trace: Trace | None) -> Iterator[str]:
    yield f'<FONT POINT-SIZE="16"><B>{escape(node.name)}</B></FONT>'
    if trace and trace.time_in(node.name):
        yield f'<FONT COLOR="{_TAKEN}"><B>{escape(trace.time_in(node.name))}</B></FONT>'
    yield escape(node.sentence) or " "
    if node.entry:
        yield f'<FONT FACE="Courier">enter / {escape(node.entry)}</FONT>'


def _stay(label: Label, trace: Trace | None) -> str:
    times = trace.times(label.number) if trace else 0
    color = f' COLOR="{_TAKEN}"' if times else ""
    said = f"{label} \N{MULTIPLICATION SIGN}{times}" if times else str(label)
    return f'<FONT FACE="Courier" POINT-SIZE="10"{color}>{escape(said)}</FONT><BR/>'


def _edge(edge: Edge, trace: Trace | None) -> str:
    steps = trace.on(edge.ends) if trace else ()
    lines = [f"({step.number}) {step.caption}".strip() for step in steps]
    lines += [str(label) for label in edge.labels]
    said = "".join(f" {_escaped(line)}\\l" for line in lines)
    drawn = ""
    if steps:
        drawn = f', color="{_TAKEN}", fontcolor="{_TAKEN}", penwidth=3'
    elif trace:
        drawn = ', color="#dde2e7", fontcolor="#b3bcc5"'
    elif edge.trouble:
        drawn = f', color="{_BAD}"'
    return f'  {_quoted(edge.source)} -> {_quoted(edge.target)} [label="{said}"{drawn}];'


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
