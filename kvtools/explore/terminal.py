"""`kvtools explore` in a terminal: tables, thresholds moved by keys, hot keys, neighbours, a command to copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Footer, Static

from kvtools.dialects.chunk import KEYS_AND_VALUES
from kvtools.dialects.interface import TableReader
from kvtools.explore.command import ClipSource, clip_command
from kvtools.explore.cuts import NOTHING, State
from kvtools.explore.page import table_facts, table_form, version_text, version_unit_of, why_no_thresholds
from kvtools.explore.survey import TableSurvey, neighbours_of
from kvtools.get import rows_of_keys
from kvtools.row_norms import as_floats
from kvtools.thresholds import Threshold
from kvtools.visible_text import visible

_NAMES = ("Frequency", "Norm", "Age")
_KEPT = ("keeps rows of any frequency", "keeps rows of any norm", "keeps rows of any age")
_CUT = ("cuts rows seen fewer than {} times", "cuts rows of norms below {}", "cuts rows last written more than {} ago")
_SORTS = ("bytes", "rows", "name", "saved")
_NEIGHBOURS = 10


class Slider(Static, can_focus=True):
    """One criterion: left and right move along its thresholds, which are percentiles of the table's rows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,plus", "move(1)", "cut more"),
        Binding("left,minus", "move(-1)", "cut less"),
        Binding("home", "move(-1000)", "none", show=False),
        Binding("end", "move(1000)", "most", show=False),
        Binding("up", "app.focus_previous", "", show=False),
        Binding("down", "app.focus_next", "", show=False),
    ]

    class Moved(Message):
        """The threshold `step` of the criterion `axis` was chosen; 0 is none."""

        def __init__(self, axis: int, step: int) -> None:
            self.axis, self.step = axis, step
            super().__init__()

    def __init__(self, axis: int) -> None:
        super().__init__(markup=False, id=f"axis-{axis}", classes="slider")
        self.axis, self.step = axis, 0
        self.thresholds: Sequence[Threshold] = ()

    def show(self, thresholds: Sequence[Threshold], step: int, rows: int, why: str) -> None:
        """Show a table's thresholds, of which one is set."""
        self.thresholds, self.step = thresholds, step
        if not thresholds:
            self.update(f"{_NAMES[self.axis]:<10}{why}")
            return
        bar = "━" * step + "●" + "─" * (len(thresholds) - step)
        said = _KEPT[self.axis]
        if step:
            threshold = thresholds[step - 1]
            said = f"{_CUT[self.axis].format(threshold.label)} ({percent(threshold.rows, rows)} of the rows)"
        self.update(Text.assemble(f"{_NAMES[self.axis]:<10}", (bar, "bold"), f"  {said}"))

    def action_move(self, steps: int) -> None:
        """Go so many thresholds further, as far as there are some."""
        step = min(max(self.step + steps, 0), len(self.thresholds))
        if step != self.step:
            self.post_message(self.Moved(self.axis, step))


class Explorer(App[str]):
    """The tables of a checkpoint in a terminal; what it returns is the command that was copied last, if any was.

    Args:
        tables: readers, in the order of `surveys`; rows are read for neighbours alone.
        surveys: what was found of each.
        source: what the command clips.
        title: what stands above.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "kvtools explore"
    CSS = """
    #title { height: 1; background: $primary; color: $text; padding: 0 1; }
    #tables { width: 45%; max-width: 76; height: 1fr; border-right: solid $panel; }
    #one { width: 1fr; padding: 0 1; }
    .slider { height: auto; padding: 0 1; }
    .slider:focus { background: $boost; }
    #saved { margin: 1 0; padding: 0 1; border-left: thick $warning; height: auto; }
    #hot, #near { height: auto; max-height: 14; margin-bottom: 1; }
    #command { height: auto; background: $panel; padding: 0 1; }
    .head { text-style: bold; }
    #about { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "copy the command"),
        Binding("d", "dry", "write or only say"),
        Binding("s", "sort", "sort"),
        Binding("r", "reset", "reset"),
        Binding("q", "quit_with", "quit"),
    ]

    def __init__(
        self, tables: Sequence[TableReader], surveys: Sequence[TableSurvey], source: ClipSource, title: str
    ) -> None:
        super().__init__()
        self.tables, self.surveys, self.source = tables, surveys, source
        self.heading = title
        self.states: list[State] = [NOTHING] * len(surveys)
        self.chosen = 0
        self.order = list(range(len(surveys)))
        self.sorted_by = "bytes"
        self.only_say = False
        self.copied: str | None = None

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(visible(self.heading), id="title", markup=False)
        with Horizontal():
            yield DataTable(id="tables", cursor_type="row")
            with VerticalScroll(id="one", can_focus=False):
                yield Static(id="about", markup=False)
                for axis in range(3):
                    yield Slider(axis)
                yield Static(id="saved", markup=False)
                yield Static("The command (c copies it)", classes="head")
                yield Static(id="command", markup=False)
                yield Static("Hot keys", id="hot-title", classes="head")
                yield DataTable(id="hot", cursor_type="row")
                yield Static("Neighbours: choose a key", id="near-title", classes="head", markup=False)
                yield DataTable(id="near", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """Fill in what does not change."""
        self._grid("tables").add_columns("table", _right("rows"), _right("bytes"), _right("cut"))
        self._grid("near").add_columns("key", _right("cosine"))
        self._list()
        self._show_table()
        self._grid("tables").focus()

    # ---- What happens

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the table on which the cursor is."""
        if event.data_table.id == "tables" and event.row_key is not None and event.row_key.value is not None:
            number = int(event.row_key.value)
            if number != self.chosen:
                self.chosen = number
                self._show_table()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Look for the neighbours of the key that was chosen; of a table, go on to its thresholds."""
        if event.data_table.id == "tables":
            self.query_one("#axis-0").focus()
        elif event.row_key.value is not None:
            key = int(event.row_key.value.split()[-1])
            self.query_one("#near-title", Static).update(f"Neighbours of key {key}: comparing all rows")
            self._look_for(self.chosen, key)

    def on_slider_moved(self, event: Slider.Moved) -> None:
        """Set a threshold."""
        state = list(self.states[self.chosen])
        state[event.axis] = event.step
        self.states[self.chosen] = (state[0], state[1], state[2])
        self._show_cuts()

    def action_copy(self) -> None:
        """Copy the command; it is printed again at the end, as not every terminal takes a copy."""
        command = self.command()
        if not command:
            self.notify("Nothing is cut yet: move a threshold first.", severity="warning")
            return
        self.copied = command
        self.copy_to_clipboard(command)
        self.notify("Copied; it is also printed when you quit.")

    def action_dry(self) -> None:
        """Let the command write, or only say what it would cut."""
        self.only_say = not self.only_say
        self._show_cuts()

    def action_sort(self) -> None:
        """Sort the tables by the next column."""
        self.sorted_by = _SORTS[(_SORTS.index(self.sorted_by) + 1) % len(_SORTS)]
        self._list()

    def action_reset(self) -> None:
        """Take all thresholds back."""
        self.states = [NOTHING] * len(self.surveys)
        self._show_cuts()
        self._list()

    def action_quit_with(self) -> None:
        """Quit, and give the command that was copied."""
        self.exit(self.copied)

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _look_for(self, number: int, key: int) -> None:
        table = self.tables[number]
        keys = np.array([key], table.key_dtype)
        rows = rows_of_keys(table, keys)
        values = table.take(rows, KEYS_AND_VALUES).values
        assert values is not None
        found = neighbours_of(table, keys, as_floats(values), _NEIGHBOURS)
        self.call_from_thread(self._show_near, number, key, found.get(key))

    # ---- What is shown

    def command(self) -> str:
        """Return the command that does what the thresholds show; "" where none is set."""
        chosen = [
            (survey.schema.name, survey.cuts.chosen(state))
            for survey, state in zip(self.surveys, self.states, strict=True)
            if state != NOTHING
        ]
        return clip_command(self.source, chosen, None if self.only_say else self.source.output) if chosen else ""

    def _list(self) -> None:
        values: dict[str, Any] = {
            "bytes": lambda number: -self.surveys[number].schema.bytes,
            "rows": lambda number: -self.surveys[number].schema.rows,
            "name": lambda number: self.surveys[number].schema.name,
            "saved": lambda number: -self._cut(number) * self.surveys[number].row_bytes,
        }
        self.order.sort(key=values[self.sorted_by])
        grid = self._grid("tables")
        chosen = self.chosen
        grid.clear()
        for number in self.order:
            schema = self.surveys[number].schema
            cells = f"{schema.rows:,}", size(schema.bytes), self._share_cut(number)
            grid.add_row(Text(visible(schema.name)), *map(_right, cells), key=str(number))
        if self.order:
            grid.move_cursor(row=self.order.index(chosen))

    def _cut(self, number: int) -> int:
        survey, state = self.surveys[number], self.states[number]
        return survey.schema.rows - survey.cuts.kept(state).rows

    def _share_cut(self, number: int) -> str:
        return percent(self._cut(number), self.surveys[number].schema.rows) if any(self.states[number]) else ""

    def _show_table(self) -> None:
        if not self.surveys:
            self.query_one("#about", Static).update("There are no key-value tables here.")
            return
        survey = self.surveys[self.chosen]
        schema = survey.schema
        about = Text.assemble((visible(schema.name), "bold"), f"\n{table_form(schema)}\n")
        about.append(", ".join(f"{value} {name}" for value, name in table_facts(survey)))
        self.query_one("#about", Static).update(about)
        self._show_cuts()
        hot, unit = survey.hot, version_unit_of(survey)
        title = "Hot keys" if survey.hot_by == "freq" else "Keys of the largest norms"
        self.query_one("#hot-title", Static).update(f"{title} (Enter shows the neighbours of one)")
        grid = self._grid("hot")
        grid.clear(columns=True)
        grid.add_columns(
            "key",
            *([_right("frequency")] if hot.freqs is not None else []),
            _right("norm"),
            *([_right("last written")] if hot.versions is not None else []),
        )
        for at, key in enumerate(hot.keys.tolist()):
            cells = [f"{int(hot.freqs[at]):,}"] if hot.freqs is not None else []
            cells.append(f"{float(hot.norms[at]):.4g}")
            cells += [version_text(int(hot.versions[at]), unit)] if hot.versions is not None else []
            grid.add_row(str(key), *map(_right, cells), key=f"{at} {key}")
        self._grid("near").clear()
        self.query_one("#near-title", Static).update("Neighbours: choose a key")

    def _show_cuts(self) -> None:
        if not self.surveys:
            return
        survey, state = self.surveys[self.chosen], self.states[self.chosen]
        why = why_no_thresholds(survey)
        for axis in range(3):
            slider = self.query_one(f"#axis-{axis}", Slider)
            slider.show(survey.cuts.axes[axis], state[axis], survey.schema.rows, why[axis])
        cut, all_rows = self._cut(self.chosen), survey.schema.rows
        said = "Nothing is cut: Tab to a threshold, and move it with the arrow keys."
        if cut:
            said = (
                f"Cuts {cut:,} of {all_rows:,} rows ({percent(cut, all_rows)}), saves {size(cut * survey.row_bytes)}."
            )
            before, after = survey.cuts.kept(NOTHING).lookups, survey.cuts.kept(state).lookups
            if before and after is not None:
                said += f" These rows had {percent(before - after, before)} of the table's lookups."
        self.query_one("#saved", Static).update(said)
        self.query_one("#command", Static).update(self.command() or "nothing is cut yet")
        grid = self._grid("tables")
        if grid.row_count:
            column = grid.ordered_columns[-1].key
            grid.update_cell(str(self.chosen), column, _right(self._share_cut(self.chosen)), update_width=True)

    def _show_near(self, number: int, key: int, found: tuple[Any, Any] | None) -> None:
        if number != self.chosen:
            return
        grid = self._grid("near")
        grid.clear()
        title = f"Neighbours of key {key}, by cosine, of all rows"
        if found is None:
            title = f"The row of key {key} has no direction, so nothing is near it"
        self.query_one("#near-title", Static).update(title)
        for at, (other, score) in enumerate(zip(*found, strict=True) if found else []):
            grid.add_row(str(other), _right(f"{score:.4f}"), key=f"{at} {other}")

    def _grid(self, name: str) -> DataTable[Any]:
        return self.query_one(f"#{name}", DataTable)


def _right(text: str) -> Text:
    return Text(text, justify="right")


def percent(part: int, whole: int) -> str:
    """Write a share: one that is not 0 is not shown as 0, nor one that is not all as all.

    >>> percent(1, 3), percent(1, 1000000), percent(999999, 1000000)
    ('33.33%', '<0.01%', '>99.99%')
    """
    share = 100 * part / whole if whole else 0.0
    if part and share < 0.01:
        return "<0.01%"
    if part < whole and share > 99.99:
        return ">99.99%"
    return f"{share:.4g}%" if share >= 10 else f"{share:.3g}%"


def size(count: int) -> str:
    """Write a number of bytes.

    >>> size(512), size(1536)
    ('512 B', '1.5 KiB')
    """
    amount, unit = float(count), 0
    while amount >= 1024 and unit < 4:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{count} B"
