"""What the backend does and what it refuses: every collective x every dtype x every reduction, beside gloo and plain
arithmetic, in groups of one, two and three that overlap; and what other people's programs do with it.

The refusals are written down here, each by its text: whatever is refused and is not among them, or the other way round,
is seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from backend_contract import BRIEF, MOVES, OPS, REDUCTIONS
from launching import SCRIPTS
from networks import Network
from networks import hosts as hosts
from once import once
from warm import Process, environment

Table = dict[str, dict[str, dict[str, list[str | None]]]]
WHOLE = {"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"}
REAL = {"float16", "bfloat16", "float32", "float64"}
COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
if hasattr(torch, "bcomplex32"):  # since torch 2.15
    COMPLEX["bcomplex32"] = "bfloat16"
ONLY_MOVED = {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
ONLY_MOVED |= {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2", "float8_e8m0fnu"}
ONLY_MOVED |= {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
EVERYTHING = WHOLE | REAL | set(COMPLEX) | ONLY_MOVED | QUANTISED

# Which reductions of which dtypes are refused: what it says, and what to do. What only moves has no reduction.
SCALE = "the scale of a quantized tensor would not be sent; send tensor.int_repr() and the scale separately"
ON_THE_WAY = "only NCCL supports this reduction; multiply before the call, and use ReduceOp.SUM"
NO_ARITHMETIC = "torch cannot compute with this dtype on the CPU; convert the tensors, for example to float32"
NO_BITS = "bitwise reductions need an integer dtype; view the tensors as integers of the same width"
ONLY_ADDED = "complex numbers can only be added; use ReduceOp.SUM or ReduceOp.AVG"
NO_MEAN = "the mean of integers may not be an integer; use ReduceOp.SUM, and divide the result"
REFUSED: list[tuple[set[str], set[str], str]] = [
    ({"", *OPS}, QUANTISED, SCALE),
    ({"PREMUL_SUM"}, EVERYTHING, ON_THE_WAY),
    (set(OPS), ONLY_MOVED, NO_ARITHMETIC),
    ({"BAND", "BOR", "BXOR"}, REAL | set(COMPLEX), NO_BITS),
    ({"PRODUCT", "MIN", "MAX"}, set(COMPLEX), ONLY_ADDED),
    ({"AVG"}, WHOLE, NO_MEAN),
]
KINDS = {
    "all_reduce_coalesced": "all_reduce",
    "reduce_scatter_unequal": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_gather_unequal": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_coalesced": "all_gather",
    "gather_single": "gather",
    "all_to_all_single": "all_to_all",
    "send_and_recv": "send",
}
# Where gloo's are not the right numbers: of two that are true it makes a byte that is neither true nor false, and it
# divides complex numbers by complex ones, which rounds in another way.
WRONG_OF_GLOO = {("SUM", "bool"), ("AVG", "complex64"), ("AVG", "complex128")}


def refusal(collective: str, op: str, dtype: str) -> str:
    """What must be said; nothing where it must be done."""
    why = next((text for ops, dtypes, text in REFUSED if op in ops and dtype in dtypes), "")
    if KINDS.get(collective, collective) == "all_reduce" and dtype in COMPLEX:  # torch's own function takes it apart
        if why in (ONLY_ADDED, NO_BITS):
            return f"all_reduce does not support RedOpType.{op} on complex tensors"
        dtype = COMPLEX[dtype]
    reduction = f" with ReduceOp.{op}" if op else ""
    return f"{KINDS.get(collective, collective)} of {dtype}{reduction}: {why}" if why else ""


def contract(folder: Path, *groups: str) -> list[dict[str, Any]]:
    """Three workers try everything: what each found."""
    command = [sys.executable, SCRIPTS / "backend_contract.py", folder, *groups]
    with Process(command, environment(CUDA_VISIBLE_DEVICES=""), stderr=PIPE) as process:
        stderr = process.communicate()[1]
    assert process.returncode == 0, stderr[-3000:]
    return found_in(folder)


def found_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def check(table: Table, dtypes: set[str]) -> None:
    """Each outcome is the one that is written down; gloo has none that we have not."""
    found = {collective: {op: set(row) for op, row in ops.items()} for collective, ops in table.items()}
    assert found == {
        **{run.__name__: dict.fromkeys(OPS, dtypes) for run in REDUCTIONS},
        **{run.__name__: {"": dtypes} for run in MOVES},
    }
    cells = [
        (c, op, dtype, *pair) for c, ops in table.items() for op, row in ops.items() for dtype, pair in row.items()
    ]
    assert {(c, op, dtype): ours for c, op, dtype, ours, _ in cells if ours != refusal(c, op, dtype)} == {}
    assert [(c, op, dtype) for c, op, dtype, ours, gloo in cells if ours and gloo == ""] == []
    assert {(op, dtype) for _, op, dtype, _, gloo in cells if gloo == "wrong"} <= WRONG_OF_GLOO


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    groups = ["0,1,2:gloo", "0,1:brief", "1,2:brief", "0:brief", "1:brief", "2:brief"]
    folder = once(tmp_path_factory, "contract of the backend", lambda folder: contract(folder, *groups))
    return found_in(folder)


def test_no_dtype_of_torch_is_left_out() -> None:
    there = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert there == EVERYTHING


@pytest.mark.parametrize("rank", range(3))
def test_each_collective_gives_what_arithmetic_gives_or_says_why_not(found: list[dict[str, Any]], rank: int) -> None:
    tables = found[rank]["table"]
    assert set(tables) == {"0,1,2", str(rank), *(pair for pair in ("0,1", "1,2") if str(rank) in pair)}
    for group, table in tables.items():
        check(table, EVERYTHING if group == "0,1,2" else set(BRIEF))


def test_where_gloo_can_it_gives_the_same(found: list[dict[str, Any]]) -> None:
    """It was asked, and for most it had an answer."""
    cells = [pair for ops in found[0]["table"]["0,1,2"].values() for row in ops.values() for pair in row.values()]
    assert sum(gloo == "" for ours, gloo in cells if ours == "") > 500


# What is refused for another reason than a dtype, in the order in which backend_programs.py asks for it.
UNEQUAL = "use equal sizes"
EACH = "pass one tensor for each worker"
SPLITS = "use the same split sizes on both workers"
SUM = "pass one split per worker; their sum must be the number of rows"
OTHERS = [
    f"all_reduce of int64 with ReduceOp.AVG: {NO_MEAN}",
    f"all_reduce of int64 with ReduceOp.AVG: {NO_MEAN}",
    f"all_gather of float32: the list has 2 tensors for 3 workers; {EACH}",
    f"all_gather of float32: a worker's own part has 2 elements, but its output has 3; {UNEQUAL}",
    "all_gather of float32: one tensor has 5 elements and the other 2, for 3 workers; pass 6 and 2 elements",
    "all_gather of float64: another tensor has the dtype float32; pass tensors of one dtype",
    f"reduce_scatter of float32 with ReduceOp.SUM: the list has 2 tensors for 3 workers; {EACH}",
    f"reduce_scatter of float32 with ReduceOp.SUM: a worker's own part has 2 elements, but its output has 4; {UNEQUAL}",
    "reduce_scatter of float32 with ReduceOp.SUM: one tensor has 7 elements and the other 2, for 3 workers; "
    "pass 6 and 2 elements",
    "reduce_scatter of float32 with ReduceOp.SUM: another tensor has the dtype int32; pass tensors of one dtype",
    f"all_to_all of float32: the list has 2 tensors for 3 workers; {EACH}",
    f"all_to_all of float32: worker 0 sends 1 element to worker 0, which expects 2; {SPLITS}",
    f"all_to_all of float32: the splits 1 + 1 + 1 do not add up to 4 rows for 3 workers; {SUM}",
    f"all_to_all of float32: the splits 1 + 2 do not add up to 4 rows for 3 workers; {SUM}",
    "all_to_all of int64: a tensor without dimensions has no rows; pass tensor.reshape(1)",
    f"all_to_all of float32: worker 0 sends 1 element to worker 2, which expects 2; {SPLITS}",
    f"scatter of float32: worker 0 sends 1 element to worker 1, which expects 2; {SPLITS}",
    "broadcast of float32: elements of an output tensor share memory; pass tensor.contiguous()",
    "broadcast of float32: a tensor's layout is sparse_coo; pass tensor.to_dense()",
    "broadcast of float32: a tensor is on the device meta; pass a tensor on the CPU",
    "broadcast of float32: a tensor is a conjugated view; pass tensor.resolve_conj().resolve_neg()",
    "sparse all_reduce of float32 with ReduceOp.MAX: this reduction of sparse tensors is not supported; "
    "pass tensor.to_dense(), or use a sum of float32",
    "all_reduce of float32 with ReduceOp.SUM: a tensor's layout is sparse_csr; pass tensor.to_dense()",
    "all_reduce of float32 with ReduceOp.SUM: another tensor has the dtype float64; pass tensors of one dtype",
    "reduce_scatter of float32 with ReduceOp.SUM: one tensor has 7 elements and the other 2, for 3 workers; "
    "pass 6 and 2 elements",
    "all_reduce got no tensors; pass at least one tensor",
    "all_gather got 0 inputs and 0 outputs; pass as many outputs as inputs, and at least one",
    "all_gather got 0 inputs and 1 output; pass as many outputs as inputs, and at least one",
    "send of float32: a tensor's layout is sparse_coo; pass tensor.to_dense()",
    "recv of float32: elements of an output tensor share memory; pass tensor.contiguous()",
]
OF_A_ROOT = [
    f"gather of float32: the list has 2 tensors for 3 workers; {EACH}",
    f"gather of float32: a worker's own part has 2 elements, but its output has 3; {UNEQUAL}",
    f"scatter of float32: the list has 4 tensors for 3 workers; {EACH}",
]


def test_what_others_do_with_a_backend(found: list[dict[str, Any]]) -> None:
    """The programs check what comes out; here only that each ran to its end, and what the refusals say."""
    for rank, worker in enumerate(found):
        said = {name: texts for name, texts in worker["programs"].items() if texts}
        assert said == {"refusals": OTHERS, **({"lists_of_a_root": OF_A_ROOT} if rank == 0 else {})}
        assert len(worker["programs"]) == 14


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_group_beside_gloo(tmp_path: Path) -> None:
    """What both refuse included."""
    for worker in contract(tmp_path, *(f"{ranks}:all" for ranks in ("0,1,2", "0,1", "1,2", "0,2", "0", "1", "2"))):
        for table in worker["table"].values():
            check(table, EVERYTHING)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("counts", [(2, 1), (1, 1, 1)], ids=str)
def test_the_same_among_several_hosts(hosts: Callable[[int], Network], counts: tuple[int, ...], tmp_path: Path) -> None:
    hosts(len(counts)).run(counts, SCRIPTS / "backend_contract.py", tmp_path, "0,1,2", "0,1", "1,2", "0,2", "0")
    for rank in range(3):
        worker = json.loads((tmp_path / f"{rank}.json").read_text())
        for table in worker["table"].values():
            check(table, EVERYTHING)
        assert worker["programs"]["refusals"] == OTHERS
