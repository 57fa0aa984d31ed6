"""A table as Markdown: every row, and the sentence of every name that a row uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .model import Line, Model, Word
from .overlay import Trace, duration

__all__ = ["markdown"]

_MARKS = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>#|~&"})


def markdown(model: Model, trace: Trace | None = None) -> str:
    """The text of a page. A path comes first, as a table of its steps."""
    blocks = [f"# {_safe(model.name.capitalize())}", f"{_safe(model.summary)}. Table `{model.digest}`."]
    if trace:
        blocks += [f"## Path of {_safe(trace.round)}", _path(trace)]
    blocks += ["## States", _states(model), "## Rows", _rows(model, trace)]
    for title, words in (("Facts", model.events), ("Guards", model.guards), ("Orders", model.orders)):
        if words:
            blocks += [f"## {title}", _words(words)]
    return "\n\n".join(blocks) + "\n"


def _states(model: Model) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for node in model.nodes:
            part = "start" if node.start else "end" if node.final else ""
            yield _name(node.name), _safe(node.sentence), _name(node.entry), part

    return _table(("state", "meaning", "order on entry", ""), rows())


def _rows(model: Model, trace: Trace | None) -> str:
    head = ("#", "fact", "from", "to", "only when", "learns", "orders")
    if trace is None:
        return _table(head, (_row(line) for line in model.lines))
    taken = ((*_row(line), str(trace.times(line.label.number) or "")) for line in model.lines)
    return _table((*head, "taken"), taken)


def _row(line: Line) -> tuple[str, ...]:
    label = line.label
    return (
        str(label.number),
        _name(label.event),
        _name(line.source),
        _name(line.target) or "stays",
        _name(label.guard),
        _name(label.learn),
        ", ".join(map(_name, label.orders)),
    )


def _path(trace: Trace) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for step in trace.steps:
            spent = "" if step.seconds is None else duration(step.seconds)
            names = _name(step.source), _name(step.target), _name(step.trigger), _name(step.guard)
            yield str(step.number), *names, spent

    return _table(("#", "from", "to", "fact", "guard", "time in from"), rows())


def _words(words: Iterable[Word]) -> str:
    return _table(("name", "meaning"), ((_name(word.name), _safe(word.sentence)) for word in words))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _name(name: str | None) -> str:
    """A name as code, unless it is none."""
    if not name:
        return ""
    return f"`{name}`" if name.isidentifier() else _safe(name)


def _safe(text: str) -> str:
    """The same text, where a page would take it for a mark."""
    return text.translate(_MARKS)
