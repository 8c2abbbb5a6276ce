"""`paceline plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.errors import EXIT_USAGE

WELL_KNOWN = """\
Weights, gradients and optimizer state under mixed-precision Adam
model       layers hidden params    ops  memory v100-16 v100-32 a100-40 a100-80
ELMo             2   4096 93.6 M  0.794  1.5 GB       1       1       1       1
GPT             12    768  117 M   1.06 1.87 GB       1       1       1       1
BERT-Tiny        2    128  4.4 M 0.0387 70.4 MB       1       1       1       1
BERT-Base       12    768  110 M      1 1.76 GB       1       1       1       1
BERT-Large      24   1024  320 M   3.04 5.12 GB       1       1       1       1
GPT-2           48   1600  1.5 B   14.5   24 GB       2       1       1       1
Megatron-LM     72   3072  8.3 B   74.4  133 GB       9       5       4       2
Turing-NLG      78   4256 17.2 B    151  275 GB      18       9       7       4
GPT-3           96  12288  175 B   1523 2800 GB     175      88      70      35

ops: operations for a token"""
MODULE = """
from torch import nn

def made():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def number():
    return 3

def broken():
    raise RuntimeError("no such luck")

def leaving():
    raise SystemExit(1)
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODULE)
    return path


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_the_well_known_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["plan", "--well-known"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(lines).startswith(WELL_KNOWN)


def test_a_plan_is_readable_in_a_pipe_and_at_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert answer(["plan", "gpt-2", "--device", "v100-32", "--devices", "8", "--batch", "64"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    assert all(len(line) <= 80 for line in table.splitlines())
    rows = [line for line in table.splitlines() if line.startswith("colocated-server:1")]
    assert rows
    assert rows[0].split()[1:4] == ["3", "3", "0"]
    assert "\n+recompute" in table


def test_no_number_is_cut_off_for_lack_of_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert answer(["plan", "gpt-2", "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert "\nparameter-server:1 " in out


def test_the_well_known_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["plan", "--well-known", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_per_parameter"] == 16
    sizes = {model["model"]: round(model["state_bytes"] / 1e9, 2) for model in told["models"]}
    assert sizes.items() >= {"BERT-Large": 5.12, "GPT-2": 24.0, "Turing-NLG": 275.2, "GPT-3": 2800.0}.items()


def test_a_plan_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "plan gpt-2 --device v100-32 --devices 4 --batch 16 --strategies single,all-reduce+recompute,tensor:1+fsdp"
    )
    assert answer(command.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GPT-2: 1.5 B parameters, mixed adam, batch 16, on 4 x v100-32 (32 GB); in GB" in out
    assert "all-reduce 3 3 18" in out
    assert "Take all-reduce+recompute: a worker needs" in out


def told(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, object]:
    assert answer(["plan", *command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = told(capsys, "--parameters 1.5B --layers 48 --devices 4 --servers 2 --device mine=40GB:100T")
    assert plan["num_parameters"] == 1.5e9
    assert plan["activations_known"] is False
    assert "Activations are unknown" in str(plan["told"])
    rows = {row["strategy"]: row for row in plan["strategies"]}  # type: ignore[attr-defined]
    assert rows["single"]["roles"][0]["memory_bytes"]["total"] == pytest.approx(24e9)
    assert {"all-reduce", "parameter-server:2", "colocated-server:2", "fsdp", "pipeline:4"} <= set(rows)
    assert plan["recommended"] in rows


def test_a_model_by_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    plan = told(capsys, "--layers 4 --hidden 64 --heads 4 --vocabulary 100 --sequence 16 --devices 2")
    assert plan["num_layers"] == 6
    assert plan["activations_known"] is True


def test_a_model_from_a_file(capsys: pytest.CaptureFixture[str], module: Path) -> None:
    plan = told(capsys, f"{module}:made --input 4 --batch 3 --precision fp32 --device cpu:1GB")
    assert plan["num_parameters"] == 4 * 8 + 8 + 8 * 2 + 2
    assert plan["num_layers"] == 3
    assert plan["flops_per_sample"] == 2 * (4 * 8 + 8 * 2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "expected a model"),
        ("gpt-9", "model 'gpt-9' is not known. Expected elmo"),
        ("gpt-2 --layers 3", "gpt-2 has its own numbers"),
        ("gpt-2 --input 3", "--input is the sample of a module from a file"),
        ("gpt-2 --device v200", "--device 'v200' is not known. Expected p100-16"),
        ("gpt-2 --device cpu:much", "the memory of --device is 'much', expected a size"),
        ("gpt-2 --device mine=0GB", "the memory of --device is '0GB', expected a size"),
        ("gpt-2 --device mine=1GB:x", "the operations a second of --device is 'x'"),
        ("gpt-2 --link string", "--link 'string' is not known"),
        ("gpt-2 --link 1GB:soon", "the latency of --link is 'soon', expected a time"),
        ("gpt-2 --network pigeon", "--network 'pigeon' is not known"),
        ("gpt-2 --devices 0", "--devices is 0, expected 1 to 1000000"),
        ("gpt-2 --devices-per-machine 0", "--devices-per-machine is 0"),
        ("gpt-2 --utilisation 2", "--utilisation is 2.0"),
        ("gpt-2 --utilisation 1e-320", "--utilisation is 1e-320, expected 1e-06 to 1"),
        ("gpt-2 --device mine=1e400GB", "the memory of --device is '1e400GB', expected a size"),
        (f"gpt-2 --strategies pipeline:{'1' * 5000}", "expected no number of more than 18 digits"),
        ("gpt-2 --servers 0", "--servers is 0"),
        ("gpt-2 --micro-batches 0", "--micro-batches is 0"),
        ("gpt-2 --batch 0", "--batch is 0"),
        ("gpt-2 --compute-s 0", "--compute-s is 0.0"),
        ("gpt-2 --compute-s nan", "--compute-s is nan"),
        ("gpt-2 --compute-s inf", "--compute-s is inf"),
        ("gpt-2 --accumulated-s -1", "--accumulated-s is -1.0"),
        ("--parameters 1e400", "--parameters is '1e400', expected a number such as 340M or 1.5B, from 1e-12 to 1e+24"),
        ("gpt-2 --optimizer lion", "lion"),
        ("gpt-2 --strategies nope", "strategy 'nope': 'nope' is not known. Expected single, all-reduce"),
        ("gpt-2 --strategies fsdp+zero-1", "'zero-1' cannot be joined"),
        ("gpt-2 --strategies single+all-reduce", "'all-reduce' cannot be joined"),
        ("gpt-2 --strategies pipeline:2+pipeline:2", "'pipeline:2' cannot be joined"),
        ("gpt-2 --strategies pipeline", "pipeline needs a number of 1 or more"),
        ("gpt-2 --strategies parameter-server:0", "parameter-server needs a number of 1 or more"),
        ("gpt-2 --strategies fsdp:3", "fsdp takes no number, got '3'"),
        ("gpt-2 --devices 8 --strategies pipeline:2+tensor:2", "is a mesh of 4 devices and there are 8"),
        ("gpt-2 --devices 6 --strategies pipeline:4+all-reduce", "do not divide 6 devices"),
        ("gpt-2 --devices 64 --batch 64 --strategies pipeline:64", "64 stages, and GPT-2 has 50 layers"),
        ("gpt-2 --devices 8 --strategies tensor:8", "8 ranks do not divide the 25 heads of GPT-2"),
        ("gpt-2 --devices 4 --batch 6 --strategies all-reduce", "a batch of 6 cannot be shared evenly by 4"),
        ("--parameters many", "--parameters is 'many', expected a number such as 340M"),
        ("--parameters 1B --layers 0", "--layers is 0 and --sequence is 1"),
        ("--parameters 1B --layers 99999999", "--layers is 99999999, expected at most 2000"),
        ("--layers 99999999 --hidden 64 --heads 1", "--layers is 99999999, expected at most 2000"),
        ("--layers 4 --hidden 64", "expected a model"),
        ("--layers 4 --hidden 64 --heads 5", "--heads 5 does not divide --hidden 64"),
        ("--layers 4 --hidden 64 --heads -4", "--heads is -4"),
        ("nowhere.py:made --input 4", "There is no file nowhere.py"),
        ("nowhere.py --input 4", "does not name a function"),
    ],
)
def test_mistakes_are_told_in_a_line(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["plan", *command.split()]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("made", "", "needs --input"),
        ("made", "--input 4,x", "--input is '4,x', expected the sizes"),
        ("made", "--input 5", "cannot be run on the meta device with an input of 1 x (5,): RuntimeError"),
        ("missing", "--input 4", "has no function missing"),
        ("number", "--input 4", "returns a int, expected a torch.nn.Module"),
        ("broken", "--input 4", "fails: RuntimeError: no such luck"),
        ("leaving", "--input 4", "fails: SystemExit: 1"),
    ],
)
def test_files_that_give_no_model(
    function: str, given: str, message: str, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["plan", f"{module}:{function}", *given.split()]) == EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("1 +", "SyntaxError"),
        ("raise SystemExit(2)", "SystemExit"),
    ],
)
def test_files_that_cannot_be_loaded(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert answer(["plan", f"{path}:made", "--input", "4"]) == EXIT_USAGE
    assert f"{path} cannot be loaded: {message}" in capsys.readouterr().err


SCRIPT = """
from __future__ import annotations
import argparse
from dataclasses import dataclass
import torch
import beside_the_script

rate = argparse.ArgumentParser().parse_args()

@dataclass
class Shape:
    width: int = beside_the_script.WIDTH

def made():
    return torch.nn.Linear(Shape().width, 2)
"""


def test_a_file_finds_what_a_script_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a_script.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside_the_script.py").write_text("WIDTH = 4")
    before = list(sys.path), list(sys.argv)
    assert answer(["plan", f"{path}:made", "--input", "4", "--devices", "2"]) == 0, capsys.readouterr().err
    assert (sys.path, sys.argv) == before


def test_ids_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "of_ids.py"
    path.write_text("import torch\ndef made():\n    return torch.nn.Sequential(torch.nn.Embedding(9, 4))\n")
    assert answer(["plan", f"{path}:made", "--input", "8", "--devices", "2"]) == EXIT_USAGE
    assert "it has embeddings: append :ids to --input for ids" in capsys.readouterr().err
    assert answer(["plan", f"{path}:made", "--input", "8:ids", "--devices", "2"]) == 0


def test_it_starts_without_torch() -> None:
    code = (
        "import sys; from paceline.cli import answer; "
        "answer(['plan', 'bert-large', '--devices', '2']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "False"
