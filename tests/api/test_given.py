"""Mistakes in what scripts give to tables are told in our words, and everything public shows itself in a short line."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.jobs import run_job
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import PeerError, UsageError
from paceline.wire.requests import Describe

SGD = paceline.update.SGD(lr=0.1)
NO_VALUES: dict[str, tuple[object, str]] = {
    "complex": (torch.ones(2, 2, dtype=torch.complex64), r"a tensor \(2, 2\) of complex64.*view_as_real"),
    "complex array": (np.ones((2, 2), dtype=complex), r"an array \(2, 2\) of complex128"),
    "text": ("x" * 1_000_000, r"is 'xxx.*\.\.\., expected a tensor"),
    "none": (None, "is None, expected a tensor, an array or a list of real numbers"),
    "ragged": ([[1.0, 2.0], [3.0]], "in equally long rows"),
    "sparse": (torch.eye(2).to_sparse(), "that is sparse.*make it dense"),
    "meta": (torch.ones(2, 2, device="meta"), "on device meta, which has no values"),
    "nested": (torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), "pad"),
    "masked": (np.ma.masked_less(np.eye(2), 1), r"an array with a mask.*array\.filled\(0\)"),
    "class": (nn.Linear, "is the class Linear"),
    "dict": ({"a": 1}, r"is \{'a': 1\}"),
    "texts": (np.array([["a", "b"], ["c", "d"]]), "an array .* of <U1"),
}


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert len(str(caught.value)) < 500, "no message prints values without bound"


def test_what_is_no_value_is_refused_by_name_and_the_worker_goes_on(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        table = worker.table("w", shape=(2, 2), update=SGD)
        rows = worker.table("r", rows=2, update=SGD)
        for value, words in NO_VALUES.values():
            refused(lambda value=value: table.push(value), f"table 'w', worker 0, clock 0: a push {words}|{words}")
            refused(lambda value=value: rows.push([1, 2], value), words)
        for out in ("x", [[0.0]], torch.empty(2, 2, dtype=torch.float64), torch.empty(2, 2, device="meta"),
                    np.empty((2, 2), dtype="int64"), torch.empty(2, 4)[:, ::2]):  # fmt: skip
            refused(lambda out=out: table.pull(out=out), r"table 'w', worker 0, clock 0: out is .*expected \(2, 2\)")
        for samples in ("many", None, -1, float("nan"), torch.ones(2), True):
            refused(lambda samples=samples: table.push(torch.ones(2, 2), samples=samples), "samples is .*0 or more")
            refused(lambda samples=samples: rows.push([1], [[1.0, 1.0]], samples=samples), "samples is .*0 or more")
        refused(lambda: worker.clock(samples="x"), "worker 0, clock 0: samples is 'x'")
        for hyper in ("x", 1.5, None, [1], [{"lr": "x"}], [{1: 2}], ({"lr": 10**30},)):
            refused(lambda hyper=hyper: table.push(torch.ones(2, 2), hyper=hyper), "hyper is .*, expected a dict")
            refused(lambda hyper=hyper: rows.push([1], [[1.0, 1.0]], hyper=hyper), "hyper is .*, expected a dict")
        for absent in ("x", 1.5, None, [1.5], (-1,), (10**30,)):
            refused(lambda absent=absent: table.push(torch.ones(2, 2), absent=absent), "absent is .*, expected a list")
        refused(lambda: rows.push([1], [[1.0, 1.0]], expected=None), "samples is None")
        refused(lambda: rows.push([1], [[1.0, 1.0]], samples=10**30), "samples is 1000")
        refused(lambda: rows.push([1], [[1.0, 1.0]], samples=1e30), r"samples is 1e\+30, expected .* below 1e\+18")
        for ahead in (None, "x", 1.5, -1, 10**30):
            refused(lambda ahead=ahead: rows.pull_later([1], ahead=ahead), "ahead is .*, expected a number of clocks")
        refused(lambda: table.call(None), "the function to call is None, expected a name")
        refused(lambda: rows.pull(torch.eye(2).to_sparse()), "sparse")
        for kind in (torch.ones(2, 2, requires_grad=True), np.ones((2, 2)), [[1, 1], [1, 1]], torch.ones(2, 2).int()):
            table.push(kind, samples=torch.tensor(2))
        worker.clock()
        torch.testing.assert_close(table.pull(), torch.full((2, 2), -0.1))

    run_job(tmp_path, work)


TWO = torch.ones(2)
NESTED = torch.nested.as_nested_tensor([torch.ones(2).long(), torch.ones(1).long()], layout=torch.jagged)
PART = {"ids": torch.tensor([1]), "order": torch.tensor([0.5])}


def _prefetched_too_often(_: Session) -> None:
    embedding = paceline.Embedding(2, 2, update=SGD)
    for _ in range(20):  # more than a clock takes: these have no effect
        embedding.prefetch(torch.zeros(1).long())
    embedding.prefetch(torch.zeros(1).long(), ahead="x")


WRONG_CALLS: list[tuple[Callable[[Session], object], str]] = [
    (lambda ps: ps.table("r", rows=2, update=SGD).pull(), r"RowTable.pull\(\) missing .*'ids'; expected pull\(ids"),
    (lambda ps: ps.table("r", rows=2, update=SGD).pull([1], 2), r"takes 2 positional .*; expected pull\(ids"),
    (lambda ps: ps.table("r", rows=2, update=SGD).pull([1], exact=TWO), "exact is a Tensor of shape .* True or False"),
    (lambda ps: ps.table("w", shape=(2,), update=SGD).push(), r"Table.push\(\) missing .*'gradient'; expected push\("),
    (lambda ps: ps.table("w", shape=(2,), update=SGD).push(TWO, sample=2), "unexpected keyword argument 'sample'"),
    (lambda ps: ps.table(), r"Session.table\(\) missing 1 required positional argument: 'name'; expected table"),
    (lambda ps: ps.table("w", shape=(2,), update=SGD, view="no"), "view is 'no', expected True or False"),
    (lambda ps: ps.table("w", shape=(2,), update=SGD, scale=TWO), r"scale is a tensor .*, expected sum, mean, samples"),
    (lambda ps: ps.table("w", shape=(2,), update=SGD, consistency=TWO), "consistency is a tensor .*expected 'ssp:3'"),
    (lambda ps: ps.table("w", rows=2, update=SGD, life={}), r"life is \{\}, expected paceline.Lifecycle"),
    (lambda ps: ps.clock(3), r"takes 1 positional argument but 2 were given; expected clock\("),
    (lambda ps: paceline.rank(0), r"rank\(\) takes 0 positional arguments .*; expected rank\(\)"),
    (lambda ps: paceline.init(timeout_s="9"), "init: timeout_s is '9', expected a number or None"),
    (lambda ps: paceline.report(loss="x"), r"loss is 'x', expected one real number\.$"),
    (lambda ps: paceline.shard(), r"shard\(\) missing 1 required positional argument: 'source'; expected shard"),
    (lambda ps: paceline.shard([1, 2], slices="x"), "shard: slices is 'x', expected a whole number"),
    (lambda ps: paceline.feed(None, batch_size=2), "cannot feed from a NoneType: expected what a function of"),
    (lambda ps: paceline.feed(paceline.sources.lines("x"), batch_size=2.5), "batch_size is 2.5, expected a whole"),
    (lambda ps: paceline.feed(paceline.sources.lines("x"), batch_size=2, on_error=[]), r"on_error is \[\], expected"),
    (lambda ps: paceline.sources.dataset(None), "dataset: path is None, expected a text"),
    (lambda ps: paceline.distributed(), r"distributed\(\) missing .*'optimizer'; expected distributed\(optimizer"),
    (lambda ps: paceline.distributed(None, views="x"), "distributed: views is 'x', expected True or False or None"),
    (lambda ps: paceline.parallelize(nn.Linear(2, 1), loss=None, data=3), "data is 3, expected a text or None"),
    (lambda ps: paceline.Embedding(2), r"Embedding.__init__\(\) missing .*'embedding_dim'.*; expected"),
    (lambda ps: paceline.Embedding(2, "x", update=SGD), "Embedding: embedding_dim is 'x', expected a whole number"),
    (lambda ps: paceline.Embedding(2, 2, update=SGD, sparse="no"), "sparse is 'no', expected True or False"),
    (
        lambda ps: paceline.EmbeddingBag(2, 2, update=SGD, include_last_offset="no"),
        "EmbeddingBag: include_last_offset is 'no', expected True or False",
    ),
    (lambda ps: paceline.Embedding(2, 2, update=SGD, init=10**400), "init is 1000.*, expected a number or one of"),
    (lambda ps: paceline.Embedding(2, 2, update=SGD, ps=3), "given ps=3, expected a session"),
    (lambda ps: paceline.Embedding(2, 2, update=SGD, dtype=TWO), "dtype is a tensor .*, expected a dtype of torch"),
    (lambda ps: paceline.Embedding(2, 2, update=SGD).prefetch(TWO.long(), ahead="x"), "ahead is 'x'"),
    (_prefetched_too_often, "ahead is 'x', expected a number of clocks"),
    (lambda ps: paceline.Embedding(2, 2, update=SGD)(NESTED), "ids are a nested tensor of int64, expected a dense"),
    (
        lambda ps: paceline.EmbeddingBag(9, 2, update=SGD)(torch.tensor([1, 2, 3]), torch.tensor([0, -1])),
        r"offsets is a tensor \(2,\) of int64 .*: index out of range",
    ),
    (lambda ps: ps.table("r", rows=2, update=SGD).pull(NESTED), "ids are a nested tensor of int64, expected a dense"),
    (lambda ps: paceline.managed(10**400), "managed: budget_mbps is 1000.*, expected a number"),
    (lambda ps: paceline.all_reduce(NESTED), "all_reduce got a nested tensor of int64, expected a dense or a sparse"),
    (lambda ps: paceline.push("x", NESTED), "push to 'x' got a nested tensor, expected a dense one"),
    (lambda ps: paceline.push("x", torch.eye(2).to_sparse_csr()), "push to 'x' got a sparse tensor, expected a dense"),
    (lambda ps: paceline.pull("a\nb"), r"pull of 'a\\nb'\.\.\., which has characters that cannot be printed"),
    (lambda ps: paceline.report(norm=10**400), "norm is 1000.*, expected one real number"),
    (lambda ps: paceline.shard(torch.tensor(3.0)), r"cannot shard a Tensor of shape \(\): expected one whose first"),
    (lambda ps: paceline.shard(np.array(3.0)), r"cannot shard a ndarray of shape \(\): expected one whose first"),
    (lambda ps: paceline.shard(torch.eye(2).to_sparse()), "cannot shard a Tensor of .*, neither sparse nor nested"),
    (lambda ps: paceline.shard([1], partition="hashed", key=3), "key is 3, expected a function"),
    (lambda ps: paceline.subscribe(ps, compress="no"), "subscribe: compress is 'no', expected True or False"),
    (lambda ps: paceline.subscribe("a\0b"), "is no place of versions, expected the folder of a job"),
    (lambda ps: paceline.subscribe(ps).table(3), "table: name is 3, expected a text"),
    (lambda ps: paceline.subscribe(ps).table("a\nb"), "a table is named .*, which has characters that cannot be"),
    (lambda ps: paceline.push("x", None), "push: tensor is None, expected a tensor"),
    (lambda ps: paceline.pull(3), "pull: name is 3, expected a text"),
    (lambda ps: paceline.strategies.all_reduce(bucket_mb="x"), "all_reduce: bucket_mb is 'x', expected a number"),
    (lambda ps: paceline.ssp("x"), "ssp: staleness is 'x', expected a whole number"),
    (lambda ps: paceline.backup(1.5), "backup: backups is 1.5, expected a whole number"),
    (lambda ps: paceline.strategies.local_sgd(steps=2.5), "local_sgd: steps is 2.5, expected a whole number"),
    (lambda ps: paceline.strategies.downpour(local_lr=[]), r"downpour: local_lr is \[\], expected a number or None"),
    (lambda ps: paceline.update.SGD(), r"SGD\(\) missing 1 required positional argument: 'lr'; expected SGD\(lr, "),
    (lambda ps: paceline.filters.TopK("x"), "share is x"),
    (lambda ps: paceline.functions.total([]), r"total: parts is \[\], expected what table.call"),
    (lambda ps: paceline.functions.total([{"a": TWO}, {"b": TWO}]), "total: 'a' is not in every part"),
    (lambda ps: paceline.functions.merge([{"a": TWO}], 1), "merge: 'ids' is not in every part, such as part 0"),
    (lambda ps: paceline.functions.merge([PART, {**PART, "ids": TWO}], 1), "merge: 'ids' is .* in part 1 and"),
    (lambda ps: paceline.functions.merge([PART], -1), "merge: k is -1, expected 0 or more"),
    (lambda ps: paceline.functions.merge([PART], torch.tensor(1.5)), "k is a Tensor.*, expected a whole number"),
    (lambda ps: paceline.functions.function_at("top", "x", None), "kind is 'x', expected 'range' or 'rows'"),
    (lambda ps: paceline.files(TWO), "files is given a Tensor, expected paths"),
    (lambda ps: paceline.sources.parquet("x", columns=3), "columns is 3, expected a list of names"),
    (lambda ps: paceline.sources.lines("\ud800"), "is not a path: expected the name of a file"),
    (lambda ps: paceline.wait(3), "argument 1 of 1 is 3, expected the future of a call with later=True"),
    (lambda ps: paceline.connect("paceline://127.0.0.1:1", token=3), "token is 3, expected a path or bytes or None"),
    (
        lambda ps: paceline.connect("paceline://127.0.0.1:1", keys="x" * 9999),
        "keys is 'xxx.*, expected a path or None|token xxx.*: File name too long",  # the latter since Python 3.14
    ),
    (lambda ps: paceline.prefetch(3, {}), "prefetch: batches is 3, expected a loader"),
    (lambda ps: paceline.prefetch([1], {3: len}), r"prefetch: ids_of is \{3: .*, expected a dict of embeddings"),
    (lambda ps: paceline.Consistency(bound="x"), "Consistency: bound is 'x', expected a whole number"),
    (lambda ps: paceline.Consistency.parse(3), "a consistency is 3, expected a text. Expected one of bsp"),
    (lambda ps: paceline.update.Adam(betas=()), "torch.optim.Adam refuses its arguments .* 'betas': "),
    (lambda ps: paceline.update.torch_optim(3), "torch_optim: class_name is 3, expected a text"),
    (lambda ps: ps.table("n", shape=(2,), update=paceline.update.SGD(lr=math.nan)), "lr is nan, expected a finite"),
    (lambda ps: paceline.filters.check_filters([3]), "a filter is a int, expected one of paceline.filters"),
    (lambda ps: ps.pull(3), "pull: argument 1 is 3, expected a table with a shape"),
    (lambda ps: ps.table("r", rows=2, update=SGD).export("a\0b"), r"path is 'a\\x00b', expected a text or a path"),
    (lambda ps: ps.table("w", shape=(2,), update=SGD).call("\ud800"), "a CallFunction cannot be sent .*surrogates"),
    (lambda ps: paceline.EmbeddingBag(2, 2, update=SGD)(TWO.long(), offsets=3), "offsets is 3 and per_sample_weights"),
    (lambda ps: paceline.strategies.all_reduce(bucket_mb=math.nan), "bucket_mb is nan, expected more than 0"),
    (lambda ps: paceline.tune(None, "x.py"), "the search is a NoneType, expected a mapping, or a file"),
    (lambda ps: paceline.tune({}, "x.py", jobs="x"), "tune: jobs is 'x', expected a whole number"),
    (lambda ps: paceline.wait(Future(), timeout_s=math.nan), "timeout_s is nan, expected a number of seconds"),
    (lambda ps: paceline.update.SGD(lr=nn.UninitializedParameter()), "a UninitializedParameter without a shape"),
    (lambda ps: paceline.update.SGD(lr=np.ndarray), "SGD: lr is the class ndarray, expected a number"),
    (lambda ps: paceline.publish(nn.Linear(1, 1), rank="0"), "publish: rank is '0', expected that of a worker, 0 to 0"),
    (lambda ps: paceline.publish(nn.Linear(1, 1), rank=1), "publish: rank is 1, expected that of a worker, 0 to 0"),
    (lambda ps: paceline.subscribe(ps).latest(timeout_s="x"), "latest: timeout_s is 'x', expected a number"),
    (lambda ps: paceline.subscribe(ps).versions(timeout_s=math.nan), "timeout_s is nan, expected a number of seconds"),
    (lambda ps: paceline.subscribe(ps).into(nn.Linear), "into: the class Linear has no weights to swap"),
    (lambda ps: paceline.subscribe(ps).wait(1.5), "wait: number is 1.5, expected a whole number or None"),
    (lambda ps: paceline.subscribe(ps).pull(None), "pull: number is None, expected a whole number"),
    (lambda _: paceline.wait(Future(), timeout_s="x"), "wait: timeout_s is 'x', expected a number or None"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")  # of torch, once in a process
def test_calls_that_do_not_fit_say_what_is_expected_and_the_worker_goes_on() -> None:
    with pytest.MonkeyPatch.context() as patched, paceline.connect() as ps:
        patched.setattr("paceline.api.script._script.session", ps)
        for call, words in WRONG_CALLS:
            refused(lambda call=call: call(ps), words)
        ps.clock()
        assert ps.table("w", shape=(2,), update=SGD).pull().tolist() == [0.0, 0.0]


def test_a_request_that_no_server_could_read_is_not_sent_and_costs_no_connection(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        table = worker.table("w", shape=(2,), update=SGD)
        rpc = worker.node.rpc
        refused(
            lambda: rpc.call(0, lambda k: Describe(k, 3), ""), "a Describe cannot be sent: .*Expected `str`, got `int`"
        )
        refused(lambda: rpc.call(0, lambda k: Describe(k, "\ud800"), ""), "a Describe cannot be sent")
        assert not rpc._open
        assert float(table.call("summary")[0]["count"]) == 2.0

    run_job(tmp_path, work)


def test_batches_that_do_not_fit_a_model_in_parts_are_shown(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = paceline.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), loss=nn.MSELoss())
        refused(lambda: model.forward_backward(None, torch.ones(4, 1)), "forward: inputs is None, expected tensors")
        refused(lambda: model.forward_backward(torch.ones(4, 2), None), "forward_backward: targets is None, expected")
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            model.forward_backward(torch.ones(4, 3), torch.ones(4, 1))
        assert caught.value.__notes__ == [
            "forward: inputs is a tensor (4, 3) of float32. See whether the model and the loss take these shapes and "
            "types."
        ]

    run_job(tmp_path, work)


def test_a_message_that_quotes_very_much_loses_its_middle() -> None:
    told = str(UsageError("what " + "x" * 100_000 + " to do"))
    assert (told[:7], told[-7:], len(told)) == ("what xx", "x to do", 2535)


def test_an_error_from_inside_of_a_call_stays_as_it_is() -> None:
    def key(_: object) -> int:
        raise TypeError("of the script")

    with pytest.MonkeyPatch.context() as patched, paceline.connect() as ps:
        patched.setattr("paceline.api.script._script.session", ps)
        with pytest.raises(TypeError, match="of the script") as caught:
            paceline.shard(["a"], partition="hashed", key=key)
        assert type(caught.value) is TypeError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shape": 3}, r"shape is 3, expected sizes such as \(3, 2\)"),
        ({"shape": "ab"}, "shape is 'ab'"),
        ({"shape": (1.5,)}, "shape: Expected `int`, got `float`"),
        ({"shape": (2,), "update": torch.optim.SGD}, "update is the class SGD"),
        ({"shape": (2,), "dtype": torch.float32}, "dtype is torch.float32, expected .*'float32'"),
        ({"shape": (2,), "init": "x"}, "init is 'x'"),
        ({"shape": (2,), "init": None}, "init is None"),
        ({"shape": (2,), "nonfinite": []}, "nonfinite: Expected `str`"),
        ({"rows": 1.5}, "rows: Expected `int`, got `float`"),
        ({"rows": 3, "filters": 3}, "filters is 3"),
        ({"rows": 3, "filters": [3]}, r"filters is \[3\], expected a list of paceline.filters"),
        ({"rows": 3, "life": 3}, "life is 3, expected paceline.Lifecycle"),
        ({"rows": 3, "scale": ""}, "scale is '', expected one of sum, mean, samples"),
        ({"rows": 3, "cache": []}, r"cache is \[\], expected True or False"),
        ({"rows": 3, "init": "a"}, "init is 'a', expected a number or one of paceline.first"),
        ({"rows": 3, "communication": 3}, "communication is 3, expected paceline.managed"),
        ({"rows": 3, "cache_rows": "x"}, "cache_rows is 'x'"),
    ],
)
def test_settings_of_wrong_types_are_refused_before_a_server_sees_them(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    def work(worker: Session) -> None:
        refused(lambda: worker.table("t", **{"update": SGD, **settings}), words)
        refused(lambda: worker.table(b"t", shape=(2,), update=SGD), "named b't', expected a text")
        refused(lambda: worker.table("a\nb", shape=(2,), update=SGD), "characters that cannot be printed")
        assert worker.table("t", shape=(2,), update=SGD).pull().shape == (2,)

    run_job(tmp_path, work)


def test_everything_public_shows_itself_in_one_short_line(tmp_path: Path) -> None:
    def work(worker: Session) -> list[str]:
        for number in range(20):
            worker.table(f"table {number} " + "x" * 400, shape=(3,), update=SGD)
        table, rows = worker.table("w", shape=(3,), update=SGD), worker.table("r", rows=3, update=SGD)
        one, two = nn.Linear(3, 1), nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))
        loader = DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=2)
        shown = [
            worker, table, rows, rows.pull_later([1]), worker.node, SGD, paceline.update.Adam(lr=0.1),
            paceline.distributed(torch.optim.SGD(one.parameters(), lr=0.1), model=one),
            paceline.distributed(
                torch.optim.Adam(two.parameters(), lr=0.1), model=two, name="n",
                strategy={f"{k}.*": f"ssp:{k}" for k in range(8)} | {"*": "bsp"},
            ),
            paceline.shard(loader), paceline.shard(iter([1, 2])), paceline.bsp(), paceline.Lifecycle(),
            paceline.Embedding(10, 3, name="e" * 300, update=SGD),
            paceline.sources.lines([f"{k}.txt" for k in range(10_000)]),
        ]  # fmt: skip
        return [repr(one) for one in shown]

    for text in run_job(tmp_path, work)[0]:
        assert len(text) <= 200, text
        assert "\n" not in text
        assert " object at 0x" not in text


def test_a_failure_while_leaving_at_exit_is_told_once_and_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(worker: Session) -> None:
        worker.node._fail("the server is gone")

        with pytest.raises(PeerError) as caught:
            worker.clock()
        monkeypatch.setattr("sys.last_value", caught.value, raising=False)
        worker.leave_at_exit()
        assert capsys.readouterr().err == "", "what ended the script was shown by Python"

    run_job(tmp_path, work)
    monkeypatch.setattr("sys.last_value", None, raising=False)

    def fail(worker: Session) -> None:
        worker.node._fail("the server is gone")
        worker.leave_at_exit()
        assert capsys.readouterr().err == "paceline: worker 0 (clock 0): the server is gone\n"

    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    run_job(other, fail)
