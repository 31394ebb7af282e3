"""Summaries counted by hand, and a report that needs nothing but itself."""

import re
from html.parser import HTMLParser

import pytest

from hf_drelay.evaluation.figures import FIGURES, LIGHT, _gate_lines, draw_figures
from hf_drelay.evaluation.records import append_rows
from hf_drelay.evaluation.report import read_headroom, write_report
from hf_drelay.evaluation.summary import (
    ALL_TASKS,
    COLUMNS,
    circumstances,
    markdown,
    quartiles,
    read_rows,
    summarize,
    table_rows,
)
from hf_drelay.modeling.draft_statistics import DraftStatistics


class TestSummary:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [([], None), ([None], None), ([3.0], (3.0, 3.0, 3.0)), ([1.0, 2.0, 3.0, 4.0, 5.0], (2.0, 3.0, 4.0))],
    )
    def test_quartiles(self, values, expected):
        assert quartiles(values) == expected

    def test_figures_of_two_rows(self, invented_rows):
        rows = [row for row in invented_rows(["gsm8k"], num_prompts=2) if row["kind"] != "prompt_lookup"]
        plain = [row for row in rows if row["way"] == "plain"]
        drafted = [row for row in rows if row["loop_gate"] is None and row["kind"] == "drafter"]
        record = next(r for r in summarize(rows) if r["task"] == ALL_TASKS and r["way"] == drafted[0]["way"])
        assert record["num_prompts"] == record["num_turns"] == 2
        assert record["speedup"][1] == pytest.approx((drafted[0]["speedup"] + drafted[1]["speedup"]) / 2)
        rates = [sum(r["num_tokens"] for r in x) / sum(r["walltimes_s"][0] for r in x) for x in (drafted, plain)]
        assert record["speedup_total"] == pytest.approx(rates[0] / rates[1])
        committed = [n for row in drafted for n in row["statistics"]["num_committed"]]
        assert record["statistics"]["acceptance_length"] == pytest.approx(sum(committed) / len(committed))
        phases = [row["phases_ms"]["verify"] for row in drafted]
        assert record["round_ms"]["verify"] == pytest.approx(sum(phases) / 80)

    def test_table_has_a_cell_for_every_column(self, invented_rows):
        records = summarize(invented_rows(["gsm8k", "mbpp"]))
        rows = table_rows(records, "mbpp")
        assert len(rows) == 4 and all(len(cells) == len(COLUMNS) for cells in rows)

    def test_markdown_has_every_task_and_the_circumstances(self, invented_rows):
        text = markdown(invented_rows(["gsm8k", "mbpp"]))
        assert text.count("| way | τ |") == 3 and "**all**" in text
        assert "3 of gsm8k.jsonl, 3 of mbpp.jsonl; at most 128 new tokens, temperature 0" in text

    def test_a_drafter_is_set_against_plain_decoding_of_its_own_run_and_prompts(self, invented_rows):
        """A file of a slow machine and one of a fast one, with other tasks: no rate of the one enters the other."""
        slow = [row | {"run": "slow"} for row in invented_rows(["gsm8k"])]
        fast = [row | {"run": "fast"} for row in invented_rows(["mbpp"])]
        fast = [row | {"walltimes_s": [w / 10 for w in row["walltimes_s"]]} for row in fast]
        alone = {r["way"]: r["speedup_total"] for r in summarize(slow) if r["task"] == ALL_TASKS}
        both = {r["way"]: r["speedup_total"] for r in summarize(slow + fast) if r["task"] == ALL_TASKS}
        for way, speedup in alone.items():
            name = way if way == "plain" else f"{way} [slow]"
            assert both[name] == pytest.approx(speedup)

    def test_several_targets_are_named_apart_plain_decoding_too(self, invented_rows):
        first = invented_rows(["gsm8k"])
        other = {"target": "hub/large", "target_weights_sha256": "cd" * 32, "run": "other"}
        second = [row | other | {"tokens_per_s": row["tokens_per_s"] / 10} for row in first]
        alone, both = summarize(first), summarize(first + second)
        assert {r["way"] for r in both} == {f"{r['way']} [{name}]" for r in alone for name in ("tiny", "large")}
        for record in alone:
            for name, factor in (("tiny", 1), ("large", 10)):
                found = next(r for r in both if r["way"] == f"{record['way']} [{name}]" and r["task"] == "gsm8k")
                assert found["tokens_per_s"][1] == pytest.approx(record["tokens_per_s"][1] / factor)
                assert found["speedup_total"] == pytest.approx(record["speedup_total"])
        text = markdown(first + second)
        assert "[tiny] Prompts: 3 of gsm8k.jsonl" in text and "[large] Prompts: 3 of gsm8k.jsonl" in text

    def test_several_runs_of_one_target_share_plain_decoding(self, invented_rows):
        first = invented_rows(["gsm8k"])
        second = [row | {"run": "ffffff000000"} for row in first]
        names = {r["way"] for r in summarize(first + second)}
        assert "plain" in names and {"prompt lookup [012345]", "prompt lookup [ffffff]"} <= names
        assert "[ffffff] Prompts" in markdown(first + second)

    def test_speedup_over_compiled_is_shown_where_it_was_measured(self, invented_rows):
        rows = invented_rows(["gsm8k"])
        assert all("speedup_over_compiled" not in record for record in summarize(rows))
        lines = [line for line in markdown(rows).splitlines() if line.startswith("| ")]
        column = [cell.strip() for cell in lines[0].split("|")].index("speedup over compiled plain")
        assert {line.split("|")[column].strip() for line in lines[1:] if "---" not in line} == {"not measured"}
        assert "compilation was not measured" in markdown(rows)

        measured = [row | {"speedup_over_compiled": row["speedup"] / 2} for row in rows]
        measured += [row | {"way": "c", "kind": "compiled", "prompt": 9, "phases_ms": None} for row in rows[:1]]
        for record in summarize([row for row in measured if row["kind"] != "compiled"]):
            assert record["speedup_over_compiled"][1] == pytest.approx(record["speedup"][1] / 2)
        assert "compilation was measured too" in markdown(measured)

    def test_a_bar_in_a_name_leaves_the_table_whole(self, invented_rows):
        rows = invented_rows(["gsm8k"], drafters=("a|b",))
        line = next(line for line in markdown(rows).splitlines() if "a\\|b" in line)
        assert line.count("|") - line.count("\\|") == len(COLUMNS) + 1

    def test_rounds_without_a_draft_show_beside_tau(self, invented_rows):
        """τ of 3 in one round of four, and three rounds without a draft: 6 tokens in 4 forwards."""
        (row,) = (r for r in invented_rows(["gsm8k"], num_prompts=1, gates=("auto",)) if r["kind"] == "drafter")
        statistics = DraftStatistics(num_plain_rounds=3)
        statistics.add_round([5, 6, 7], [0, 0, 0], [5, 6, 7], [5, 6, 9], num_stages=1)
        row |= {"statistics": statistics.to_dict(), "num_tokens": 7, "num_forwards": 4, "round_tokens": 6}
        record = summarize([row])[0]
        assert record["statistics"]["acceptance_length"] == 3.0 and record["tokens_per_round"] == 1.5
        cells = dict(zip((heading for heading, _ in COLUMNS), table_rows([record], "gsm8k")[0], strict=True))
        assert (cells["τ"], cells["tokens / forward"]) == ("3.00", "1.50")

    def test_tokens_of_a_round_count_rounds_without_a_draft(self, invented_rows):
        (row,) = (r for r in invented_rows(["gsm8k"], num_prompts=1, gates=(None,)) if r["kind"] == "drafter")
        record = summarize([row | {"num_tokens": 41, "num_forwards": 20}])[0]
        assert record["tokens_per_round"] == 2.0

    def test_files_without_rows_are_named(self, tmp_path):
        with pytest.raises(OSError, match="missing.json is no file"):
            read_rows([tmp_path / "missing.json"])
        (tmp_path / "empty.json").write_text("")
        with pytest.raises(ValueError, match="empty.json holds no rows"):
            read_rows([tmp_path / "empty.json"])
        append_rows(tmp_path / "other.json", [{"name": "x"}])
        with pytest.raises(ValueError, match="other.json is no file of result rows"):
            read_rows([tmp_path / "other.json"])

    def test_a_row_that_lacks_a_field_is_named(self, invented_rows, tmp_path):
        rows = invented_rows(["gsm8k"], num_prompts=1)
        append_rows(tmp_path / "rows.json", [rows[0], {k: v for k, v in rows[1].items() if k != "walltimes_s"}])
        with pytest.raises(ValueError, match="row 2, .* lacks `walltimes_s`"):
            read_rows([tmp_path / "rows.json"])

    def test_same_number_in_two_files_of_other_prompts_is_two_prompts(self, invented_rows):
        rows = [
            row | {"turns_sha256": sha} for sha in "ab" for row in invented_rows(["gsm8k"], (None,), num_prompts=1)
        ]
        records = [record for record in summarize(rows) if record["task"] == "gsm8k"]
        assert [record["num_prompts"] for record in records] == [2, 2, 2]
        assert "Prompts: 2 of gsm8k.jsonl" in circumstances(rows)[0]

    def test_what_shapes_the_distribution_is_told(self, invented_rows):
        rows = invented_rows(["gsm8k"], num_prompts=1)
        rows = [row | {"generation_config": {"repetition_penalty": 1.1}} for row in rows]
        for row in rows:
            row["settings"] |= {"temperature": 0.7, "top_p": 1.0, "top_k": 5}
        assert "temperature 0.7, top_k 5, repetition_penalty 1.1, seed" in circumstances(rows)[0]

    @pytest.mark.parametrize("content", ["5", "{}", '{"headroom": {}}'])
    def test_file_of_something_else_than_headroom_is_refused(self, content, tmp_path):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match="other.json is no file of `hf-drelay headroom`"):
            read_headroom(tmp_path / "other.json")

    def test_a_file_that_is_named_twice_counts_once(self, invented_rows, tmp_path):
        append_rows(tmp_path / "rows.json", invented_rows(["gsm8k"], num_prompts=1))
        assert len(read_rows([tmp_path / "rows.json", tmp_path / "." / "rows.json"])) == 4


class Page(HTMLParser):
    """Tags that are open, and addresses that a browser would fetch."""

    VOID = {"meta", "link", "br", "img", "path", "use", "rect"}

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def _look(handle) -> tuple:
    """What tells the entries of a legend apart."""
    patch = handle.patches[0] if hasattr(handle, "patches") else handle
    if hasattr(patch, "get_hatch") and not hasattr(patch, "get_paths"):
        return "bar", patch.get_facecolor(), patch.get_hatch()
    if hasattr(patch, "get_marker"):
        return "line", patch.get_color(), patch.get_marker(), patch.get_linestyle()
    return "points", tuple(patch.get_facecolor()[0]), patch.get_paths()[0].vertices.tobytes()


class TestReport:
    @pytest.fixture(scope="class")
    @classmethod
    def page(cls, invented_rows, tmp_path_factory):
        folder = tmp_path_factory.mktemp("report")
        headroom = {"num_errors": 2} | dict.fromkeys(
            (
                *("pool_coverage", "suffix_share_right", "control_share_right", "mean_oracle_gain"),
                *("mean_selector_gain", "selector_share_of_ceiling", "num_covered", "num_suffix_right"),
                *("num_suffix_cases", "num_control_right", "num_control_cases", "oracle_gain", "num_blocks"),
                "selector_gain",
            )
        )
        rows = invented_rows(["gsm8k", "mt_bench"], gates=(None, -1.0, -0.5))
        write_report(rows, folder / "report.html", folder / "figures", folder / "tables.md", headroom)
        return folder, (folder / "report.html").read_text(encoding="utf-8")

    def test_page_is_whole_and_fetches_nothing(self, page):
        parser = Page()
        parser.feed(page[1])
        assert not parser.open and parser.tags.count("svg") == len(FIGURES)
        assert all(address.startswith(("#", "data:")) for address in parser.addresses)
        assert not re.search(r"url\((?!#)|@import", page[1])
        assert len(set(parser.ids)) == len(parser.ids), "identifiers must be unique in a page"

    def test_every_reference_inside_the_page_has_its_aim(self, page):
        ids = set(re.findall(r'\bid="([^"]+)"', page[1]))
        used = set(re.findall(r'href="#([^"]+)"', page[1])) | set(re.findall(r"url\(#([^)]+)\)", page[1]))
        assert used and used <= ids

    def test_text_of_the_sample_is_escaped(self, page):
        assert "&lt;b&gt;5&lt;/b&gt;" in page[1] and "<b>5</b>" not in page[1]

    def test_page_follows_the_colour_scheme(self, page):
        assert "prefers-color-scheme: dark" in page[1] and "var(--series-0)" in page[1]
        assert "#0102" not in page[1] and "#010101" not in page[1], "a marker colour was left over"

    @pytest.mark.browser
    def test_page_opens_in_a_browser_without_a_network(self, page, browser):
        context = browser.new_context(offline=True)
        visited, problems, requests = context.new_page(), [], []
        visited.on("pageerror", lambda error: problems.append(str(error)))
        visited.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        visited.on("request", lambda request: requests.append(request.url))
        visited.goto((page[0] / "report.html").as_uri())
        figures = visited.locator("figure svg, svg[role=img]")
        assert figures.count() == len(FIGURES)
        boxes = [figures.nth(i).bounding_box() for i in range(figures.count())]
        assert all(box["width"] > 200 and box["height"] > 100 for box in boxes)
        assert visited.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
        context.close()
        assert not problems and len(requests) == 1

    def test_figures_are_files_too(self, page):
        names = {path.name for path in (page[0] / "figures").iterdir()}
        assert names == {f"{n}{s}.{e}" for n in FIGURES for s in ("", "_dark") for e in ("svg", "png")}
        for path in (page[0] / "figures").glob("*.png"):
            assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5000

    def test_axes_have_labels_and_legends_do_not_cover_anything(self, invented_rows):
        rows = invented_rows(["gsm8k", "livecodebench"], gates=(None, -1.0, -0.5), drafters=("a" * 30, "b" * 30))
        for name, (draw, _) in FIGURES.items():
            figure = draw(summarize(rows), LIGHT)
            figure.draw_without_rendering()
            axes, legend = figure.axes[0], figure.legends[0]
            assert axes.get_xlabel(), name
            assert axes.get_ylabel() or [label.get_text() for label in axes.get_yticklabels()], name
            box = legend.get_window_extent()
            assert box.y0 >= axes.get_window_extent().y1 - 1, f"{name}: the legend reaches into the axes"
            assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, f"{name}: the legend is cut"
            label = axes.yaxis.label.get_window_extent()
            assert label.y1 <= box.y0 + 1 or not axes.get_ylabel(), f"{name}: the label reaches into the legend"
            assert label.y0 >= -1, f"{name}: the label is cut"

    def test_many_ways_are_all_in_the_legend_and_differ(self, invented_rows):
        """21 ways: more than there are colours, names that begin with an underscore, and one with a formula in it."""
        drafters = ("_hidden", "$x^2$", "c" * 130, "d", "e")
        rows = invented_rows(["gsm8k", "mbpp", "alpaca"], gates=(None, -1.0, -0.5, "auto"), drafters=drafters)
        records = summarize(rows)
        ways = {record["way"] for record in records} - {"plain"}
        assert len(ways) == 21
        for name in ("speedup", "acceptance_by_slot", "break_even"):
            figure = FIGURES[name][0](records, LIGHT)
            figure.draw_without_rendering()
            (legend,) = figure.legends
            labels = ["".join(text.get_text().split()) for text in legend.get_texts()]  # however they were broken
            shown = {way for way in ways if "".join(way.split()) in [label.split(":")[0] for label in labels]}
            assert shown == ways, name
            looks = [_look(handle) for handle in legend.legend_handles]
            assert len(set(looks)) == len(looks), f"{name}: two ways look the same"
            assert legend.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1 - 1, name
            assert legend.get_window_extent().x1 <= figure.bbox.x1 + 1, name

    def test_bars_of_many_ways_are_spread_over_lines(self, invented_rows):
        tasks = ["gsm8k", "math500", "aime25", "humaneval", "mbpp"]
        rows = invented_rows(tasks, gates=(None, -1.0, -0.5, "auto"), drafters=tuple("abcde"), num_prompts=1)
        figure = FIGURES["speedup"][0](summarize(rows), LIGHT)
        figure.draw_without_rendering()
        labels = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
        assert len(figure.axes) == 2 and labels == [*tasks, ALL_TASKS]
        widths = [bar.get_window_extent().width for axes in figure.axes for bar in axes.patches]
        assert len(widths) == 21 * 6 and min(widths) > 0.06 * figure.dpi

    def test_dloop_gain_shows_every_gate_and_counts_rounds_without_a_draft(self, invented_rows):
        rows = invented_rows(["gsm8k"], gates=(None, "-inf", -1.0, "auto"), drafters=("x", "x #2"), num_prompts=1)
        for row in rows:
            # τ stays what it was, but every other round of the cost-aware gate has no draft.
            tokens = {None: 2, "-inf": 3, -1.0: 4, "auto": 1}[row["loop_gate"]] * (1 + row["way"].startswith("x #2"))
            row |= {"num_forwards": 40, "round_tokens": 40 * tokens, "num_tokens": 1 + 40 * tokens}
        lines = _gate_lines(summarize(rows))
        assert list(lines) == ["x, ≤ 3 stages", "x #2, ≤ 3 stages"]
        for points in lines.values():
            assert {gate: tokens for gate, (tokens, _) in points.items()} == {"-inf": 1.5, -1.0: 2.0, "auto": 0.5}
        axes = FIGURES["dloop_gain"][0](summarize(rows), LIGHT).axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["-inf", "-1", "auto"]

    @pytest.mark.parametrize("kind", ["one row", "drafter only", "two targets", "sweep"])
    def test_odd_rows_make_a_report(self, invented_rows, tmp_path, kind):
        rows = invented_rows(["gsm8k"], num_prompts=1)
        if kind == "one row":
            rows = rows[:1]
        elif kind == "drafter only":
            rows = [row for row in rows if row["kind"] == "drafter"]
        elif kind == "two targets":
            rows += [row | {"run": "b", "target": "other", "target_weights_sha256": "b"} for row in rows]
        else:
            rows = [row for row in rows if row["kind"] != "prompt_lookup"]
            rows = [row | {"num_draft_tokens": 2, "block_size": 5, "use_selector": True} for row in rows]
        write_report(rows, tmp_path / "r.html", tmp_path / "figures", tmp_path / "r.md")
        parser = Page()
        parser.feed((tmp_path / "r.html").read_text(encoding="utf-8"))
        assert not parser.open and "nan" not in (tmp_path / "r.md").read_text()

    def test_records_without_drafts_give_fewer_figures(self, invented_rows):
        rows = [row for row in invented_rows(["gsm8k"]) if row["kind"] == "plain"]
        assert [figure.name for figure in draw_figures(summarize(rows))] == ["round_ms"]

    def test_the_same_rows_give_the_same_page(self, page, invented_rows, tmp_path):
        rows = [row for row in invented_rows(["gsm8k"]) if row["kind"] == "plain"]
        for name in ("a", "b"):
            write_report(rows, tmp_path / f"{name}.html")
        assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()
