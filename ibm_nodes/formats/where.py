"""Where: a condition on the columns of a row, of which an expression of pyarrow's tells whether it holds."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ibm_nodes.formats.lists import Lists

GUESSES = (None, pa.string(), pa.float64(), pa.bool_(), pa.list_(pa.int64()), pa.list_(pa.string()))
"""Types that are tried for a column in which all values of a block are null, when a function takes not just any."""


class Where:
    """Tells which rows are wanted: those for which the expression is true, neither false nor null.

    ``str`` gives the expression's text, and a hash where pyarrow shortens it.

    Args:
        expression: of ``pyarrow.compute``, over the names of columns.

    Raises:
        TypeError: if it is something else.
    """

    def __init__(self, expression: pc.Expression) -> None:
        if not isinstance(expression, pc.Expression):
            raise TypeError(
                "where must be an expression such as pyarrow.compute.field('score') > 0.5, got a "
                f"{type(expression).__name__}"
            )
        self._expression = expression
        self._text = str(expression)
        if "FieldPath(" in self._text:
            raise TypeError(f"where must look at columns by their names, not by their numbers, got {self._text}")
        if "..." in self._text:
            self._text += f" {hashlib.blake2b(pickle.dumps(expression), digest_size=8).hexdigest()}"

    def __str__(self) -> str:
        return self._text

    def columns(self, schema: pa.Schema, url: str) -> list[str]:
        """Gives the columns that it looks at.

        Raises:
            LookupError: if there is not each of them; names those that there are.
            TypeError: if it cannot be computed of columns of these types, or gives neither true nor false.
        """
        named = [name for name in dict.fromkeys(schema.names) if name in self._text]
        table = schema.empty_table().select(named)
        self._compute(table, url)
        return [name for name in named if not self._can_do_without(name, table)]

    def cut(self, lists: Lists, table: pa.Table, url: str) -> Lists:
        """Makes empty rows of those that are not wanted.

        Args:
            lists: the rows.
            table: the columns that it looks at, a row for each.
            url: the file, for messages.
        """
        table.validate(full=True)  # damaged offsets would be read outside the buffer
        return replace(lists, ends=np.where(self._compute(table, url), lists.ends, lists.begins))

    def choose(self, rows: Sequence[dict[str, Any]], places: Sequence[str], url: str) -> np.ndarray:
        """Tells which rows of Python's own values are wanted; a block's columns have the types of their values.

        Raises:
            LookupError: naming the place, if a row lacks a column.
            TypeError: as ``columns`` does, or if the values of a column are of several types.
        """
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name in self._text]
        try:
            table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise TypeError(f"where={self} cannot be computed for {url}: a column has no one type: {error}") from error
        if not rows:
            return np.zeros(0, bool)
        wanted = self._compute(table, url)
        needed = [name for name in names if not self._can_do_without(name, table.slice(0, 0))]
        for row, place in zip(rows, places, strict=True):
            for name in needed:
                if name not in row:
                    raise LookupError(f"no column {name!r} in {place}, which where={self} looks at")
        return wanted

    def _compute(self, table: pa.Table, url: str) -> np.ndarray:
        try:
            found = self._try(table)
        except pa.ArrowInvalid as error:
            if "FieldRef" not in str(error):
                raise
            names = ", ".join(map(repr, table.schema.names)) or "none of those that it names"
            raise LookupError(f"where={self} looks at columns that {url} has not: there is {names}") from error
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise TypeError(f"where={self} cannot be computed for {url}: {error}") from error
        if not pa.types.is_boolean(found.type) and not pa.types.is_null(found.type):
            raise TypeError(f"where={self} must be true or false for a row, and is a {found.type} for {url}")
        chosen: np.ndarray = np.asarray(found.cast(pa.bool_()).fill_null(False), bool)
        return chosen

    def _try(self, table: pa.Table) -> pa.ChunkedArray:
        """Computes it; functions that do not take columns of nothing but nulls get them as another type."""
        missing = [index for index, field in enumerate(table.schema) if pa.types.is_null(field.type)]
        for number, kind in enumerate(GUESSES):
            for index in missing if kind else ():
                table = table.set_column(index, table.schema.names[index], pa.nulls(len(table), kind))
            try:
                return _project(table, self._expression)
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
                if not missing or number == len(GUESSES) - 1:
                    raise
        raise AssertionError("unreachable")

    def _can_do_without(self, name: str, table: pa.Table) -> bool:
        try:
            self._try(table.drop_columns([name]))
        except pa.ArrowException:
            return False
        return True


def _project(table: pa.Table, expression: pc.Expression) -> pa.ChunkedArray:
    """Computes an expression in the calling thread, row by row in their order."""
    from pyarrow import acero

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["wanted"]))
    return acero.Declaration.from_sequence([source, project]).to_table(use_threads=False).column("wanted")
