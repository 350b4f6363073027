"""The scripts of the benchmark suite run, check their numbers, and write what they found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(name="suite")
def suite_fixture(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.filterwarnings("ignore")
def test_the_suite_runs_at_its_tiny_sizes(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--device", "cpu", "--no-plots", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    for part in ("preparation", "packing", "attention", "models", "motion", "llm", "captured_masks"):
        assert (tmp_path / f"{part}.csv").read_text().count("\n") > 1
        assert f"# {part}" in (tmp_path / f"{part}.md").read_text()

    assert "median of all shapes" in (tmp_path / "bars.md").read_text()


def test_bars_compare_what_they_say(suite):
    from bars import bars, markdown
    from measure import Row

    def row(case, route, median, **more):
        return Row(group=more.pop("group", "forward"), case=case, route=route, median_us=median, **more)

    flux = "Flux B4 S4608, no mask"
    found = bars(
        [
            row(flux, "native: bare kernel, ideal rows", 100.0, syncs=0),
            row(flux, "native: uniform", 106.0, syncs=0),
            row(flux, "native: uniform, compiled", 101.0, syncs=0),
            row("Flux B4 S4608, 4608/1000/300/77", "SDPA, mask", 400.0),
            row("Flux B4 S4608, 4608/1000/300/77", "cudnn: packed", 150.0),
            row("Flux B4 S4608, 4608/1000/300/77", "cudnn: in_place", 90.0),
            row("Flux, compiled", "varlen_prep, flash3", 100.0, group="models", first_s=10.0),
            row("Flux, compiled", "diffusers SDPA, mask", 110.0, group="models", first_s=10.0),
            row("Flux, compiled, beside the hub route", "varlen_prep, flash3", 101.0, group="models"),
            row(
                "Flux, compiled, beside the hub route",
                "diffusers _flash_3_varlen_hub",
                106.05,
                group="models",
                first_s=40.0,
            ),
        ]
    )
    told = {bar.claim: (bar.found, bar.met) for bar in found}
    assert told["native over the bare kernel, no mask, eager"] == (1.06, False)
    assert told["native over the bare kernel, no mask, compiled"] == (1.01, True)
    assert told["flash3 over the bare kernel, no mask, eager"] == (None, None)
    assert told["best kernel over SDPA with a mask, key lengths 4608/1000/300/77"] == (0.225, True)
    assert told["Flux, compiled, flash3: speed over diffusers SDPA, mask"] == (1.1, True)
    assert told["Flux, compiled, flash3: speed over diffusers _flash_3_varlen_hub"] == (1.05, False)
    assert told["Flux, flash3: time to compile over that of diffusers _flash_3_varlen_hub"] == (0.25, True)
    assert told["syncs without a mask"] == (0, True)
    assert told["graphs for 50 shapes"] == (None, None)
    assert "not measured" in markdown(list(bars([])))


def test_rows_survive_the_file(suite, tmp_path):
    from measure import Row
    from report import markdown, read_csv, write_csv

    rows = [
        Row(group="g", case="c", route="a", median_us=12.4, low_us=11.0, high_us=13.0, kernels=3),
        Row(group="g", case="c", route="b", note="TypeError: no"),
    ]
    write_csv(tmp_path / "rows.csv", rows)
    assert read_csv(tmp_path / "rows.csv") == rows
    table = markdown(rows)
    assert "| a | 12 | 11-13 | 3 |  |" in table
    assert "syncs" not in table, "nothing was measured in that column"


def test_the_check_of_attention_sees_a_wrong_key(suite):
    from measure import attention_error

    q, k, v = (torch.randn(2, 5, 4, 8) for _ in "qkv")
    allowed = torch.tensor([[True, True, False, True, False], [True, True, True, True, True]])
    samples = [(0, 1), (1, 4)]
    dense = allowed[[0, 1]][:, None, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense
    ).transpose(1, 2)
    assert attention_error(out, q, k, v, allowed, samples) < 1e-5
    assert attention_error(out, q, k, v, allowed.roll(1, 1), samples) > 1e-2


def test_the_check_of_attention_takes_queries_without_their_padding(suite):
    from attention_cases import Problem, cases

    problem = Problem(next(case for case in cases("cpu") if case.name == "right"), "cpu")
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)), attn_mask=problem.mask[:, None, None]
    ).transpose(1, 2)
    assert problem.error(out) < 1e-5
    assert problem.error(out[problem.mask]) < 1e-5
    assert problem.error(out[problem.mask].roll(1, 0)) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_the_flux_model_is_clean_here_and_not_on_the_route_of_diffusers(suite):
    from audit_flux import audits

    found = audits()
    found["varlen_prep"].assert_clean()
    theirs = found["diffusers' own route"]
    assert len(theirs.breaks) == 2
    assert len(theirs.reads) == 3
    assert all("attention_dispatch.py" in read.place.file for read in theirs.reads)
