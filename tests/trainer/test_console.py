from rich.console import Console as RichConsole

from trainer.report.console import Console


def _console(enabled: bool = True) -> Console:
    console = Console(enabled)
    console._rich = RichConsole(record=True, width=200, force_terminal=False)
    return console


def test_what_a_model_writes_is_shown_as_it_is():
    console = _console()
    console.samples("t", ["answer"], [["fine [/INST] x"], ["lost [red] text"]])
    console.summary("done", ["/runs/[bold]/metrics.csv"])
    shown = console._rich.export_text()
    assert "fine [/INST] x" in shown and "lost [red] text" in shown and "/runs/[bold]/metrics.csv" in shown


def test_a_row_per_step_under_one_heading_and_timings_that_add_up():
    console, timings = _console(), {}
    for step in (1, 2):
        console.step({"training/global_step": step, "reward/mean": 0.5})
        with console.phase("rollout", timings, "gen"):
            pass
    lines = console._rich.export_text().splitlines()
    assert len(lines) == 3 and lines[0].split()[:2] == ["step", "reward"] and lines[2].split() == ["2", "0.500"]
    assert timings["timing_s/gen"] > 0


def test_a_silent_console_still_says_how_it_ended():
    console = _console(enabled=False)
    console.step({"training/global_step": 1})
    console.samples("t", ["a"], [["b"]])
    console.summary("done", ["fine"])
    assert "fine" in console._rich.export_text() and "step" not in console._rich.export_text(clear=False)
