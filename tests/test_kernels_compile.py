"""Every CUDA kernel compiles, without a GPU, for every architecture and option that ep_comm uses."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ep_comm.cuda import driver, sources
from ep_comm.cuda.driver import Launcher
from ep_comm.cuda.nvrtc import KernelError, compile_to_cubin, find_nvrtc, nvrtc_version
from ep_comm.cuda.sources import build, kernel_sources
from ep_comm.cuda.tuning import GatherTuning, RingShape, default_gather_tuning, default_scatter_tuning
from ep_comm.cuda.window import MIN_SHARED_BYTES, PlanLaunch

ARCHITECTURES = ("sm_90", "sm_100")
# Every shape that rows can get: whole rows of up to 28 vectors of a warp, longer ones in pieces of that.
RINGS = list(dict.fromkeys(RingShape.of(512 * vectors) for vectors in range(1, 29)))
BUILDS = {
    "barrier": [("barrier.cu", {})],
    "record": [("record.cu", {})],
    "hop": [("hop.cu", {})],
    "plan": [("plan.cu", {"IDX64": wide, "ITEMS_PER_WARP": items}) for wide, items in ((0, 128), (1, 512))],
    "routing": [("routing.cu", {"IDX64": wide, "ITEMS_PER_WARP": items}) for wide, items in ((0, 128), (1, 512))],
    "scatter": [
        ("scatter.cu", {"DTYPE": dtype, "VEC_BYTES": vec})
        for dtype, vec in ((0, 16), (0, 8), (0, 4), (1, 16), (1, 8), (1, 4), (1, 2), (2, 16))
    ],
    "scatter mxfp8": [
        ("scatter.cu", {"DTYPE": dtype, "WIRE": 1, "OUT_MXFP8": keep, "SCALE_FLOOR": floor})
        for dtype, keep, floor in ((0, 0, 0), (1, 0, 0), (1, 1, 1), (2, 0, 1))
    ],
    "scatter on few multiprocessors": [
        ("scatter.cu", {"DTYPE": dtype, "WIRE": wire, "OUT_MXFP8": keep, "WARPS": 32, "BLOCKS_PER_SM": 1})
        for dtype, wire, keep in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))
    ],
    "gather": [
        ("gather.cu", {"DTYPE": dtype, "VEC_BYTES": vec, "WEIGHTED": weighted})
        for dtype, vec, weighted in ((0, 16, 0), (0, 4, 1), (1, 16, 0), (1, 16, 1), (1, 2, 0), (2, 8, 1))
    ],
    "gather_ring": [
        ("gather_ring.cu", {"DTYPE": dtype, "WEIGHTED": weighted, **shape.defines})
        for dtype, weighted, shapes in ((1, 1, RINGS), (1, 0, RINGS), (2, 1, RINGS[-1:]), (0, 1, RINGS[-1:]))
        for shape in shapes
    ],
    "gather_bulk": [
        ("gather_bulk.cu", {"DTYPE": dtype, "WEIGHTED": weighted, "CHUNK_BYTES": chunk})
        for dtype, weighted, chunk in ((0, 1, 1024), (1, 0, 1024), (1, 1, 2048), (2, 0, 512))
    ],
    "row_ops": [
        ("row_ops.cu", {"DTYPE": dtype, "SCALE_FLOOR": floor, "TREE_LEVELS": levels})
        for dtype, floor, levels in ((0, 0, 0), (1, 0, 5), (2, 1, 4))
    ],
    "table_ops": [
        ("table_ops.cu", {"DTYPE": dtype, "VEC_BYTES": vec, "OUT_DTYPE": out})
        for dtype, vec, out in ((0, 16, 0), (0, 16, 1), (1, 16, 1), (1, 8, 0), (1, 2, 1), (2, 4, 2))
    ],
}


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        find_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EP_COMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("group", BUILDS)
def test_compiles(group: str, arch: str, cache: Path) -> None:
    if arch == "sm_100" and nvrtc_version() < (12, 8):
        pytest.skip(f"NVRTC {nvrtc_version()} is older than sm_100")
    for file, defines in BUILDS[group]:
        assert build(file, arch, defines)[:4] == b"\x7fELF"


def test_the_blocks_of_a_plan_run_at_once(cache: Path) -> None:
    """They wait for each other: their registers and shared memory must leave room for as many as are launched."""
    code = build("plan.cu", "sm_90", {"IDX64": 1, "ITEMS_PER_WARP": 512})
    launch = PlanLaunch.of(132, num_tokens=1 << 17, top_k=8, num_experts=256, ep_size=64)
    assert launch.items_per_warp == 512 and launch.resident_blocks(132) == 2 * 132
    assert 2 * 32 * PlanLaunch.WARPS * registers(code) <= 65536


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_ring_fits_a_multiprocessor(arch: str, cache: Path) -> None:
    """Its registers, without spilling, and its shared memory, for every length of a row."""
    if arch == "sm_100" and nvrtc_version() < (12, 8):
        pytest.skip(f"NVRTC {nvrtc_version()} is older than sm_100")
    for row_bytes in [*range(16, 40_000, 16), 2**20]:
        assert RingShape.of(row_bytes) in RINGS
    for shape in RINGS:
        code = build("gather_ring.cu", arch, {"DTYPE": 1, "WEIGHTED": 1, **shape.defines})
        assert shape.threads * registers(code) <= 65536
        assert attribute(code, _STACK_SIZE) <= 16
        static = section_bytes(code, b".nv.shared.gather_sum_ring")
        assert 0 < static and static + shape.shared_bytes <= MIN_SHARED_BYTES


def test_the_measured_choices() -> None:
    assert default_gather_tuning(24, 8192, 14336) == default_gather_tuning(None, 256, 14336) == GatherTuning()
    assert default_gather_tuning(None, 8192, 14344).kernel != "ring"
    assert default_gather_tuning(None, 128, 14336).kernel == default_gather_tuning(24, 512, 4096).kernel == "bulk"
    assert RingShape.of(14336) == RingShape.of(28672) == RingShape(2, 2, 7, 4, 7)
    assert default_scatter_tuning(None).blocks_per_sm == 2
    for num_sms, segments in ((24, 1), (63, 1), (64, 4), (132, 4)):
        tuning = default_scatter_tuning(num_sms)
        assert (tuning.blocks_per_sm, tuning.warps, tuning.segments, tuning.lag) == (1, 32, segments, 1)


_REGISTERS, _STACK_SIZE = 0x2F, 0x12  # attributes of a kernel: EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE


def registers(code: bytes) -> int:
    """Of a thread."""
    return attribute(code, _REGISTERS)


def attribute(code: bytes, number: int) -> int:
    """The largest value of a compiled kernel's attribute that comes as symbol and number."""
    values = [
        struct.unpack_from("<I", code, entry + 8)[0]
        for name, offset, length in sections(code)
        if name == b".nv.info"
        for entry in range(offset, offset + length, 4)
        if code[entry : entry + 4] == bytes((4, number, 8, 0))
    ]
    assert values, f"the compiled kernel has no attribute {number:#x}"
    return max(values)


def section_bytes(code: bytes, name: bytes) -> int:
    return sum(length for section, _, length in sections(code) if section == name)


def sections(code: bytes) -> list[tuple[bytes, int, int]]:
    """Name, offset and length of an ELF file's sections."""
    at = struct.unpack_from("<Q", code, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, at + size * i) for i in range(count)]
    start = headers[names][4]
    return [(code[start + h[0] : code.index(b"\0", start + h[0])], h[4], h[5]) for h in headers]


def test_every_source_is_compiled_above() -> None:
    files = {file for builds in BUILDS.values() for file, _ in builds}
    assert files == {name for name in kernel_sources() if name.endswith(".cu")}


def test_cache_is_read_instead_of_compiling(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = build("barrier.cu", "sm_90", {})
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]
    monkeypatch.setattr(sources, "compile_to_cubin", None)
    assert build("barrier.cu", "sm_90", {}) == code


def test_cache_key_covers_source_arch_and_defines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, tuple[str, ...]]] = []

    def record(name: str, source: str, headers: dict[str, str], arch: str, options: list[str]) -> bytes:
        compiled.append((arch, tuple(options)))
        return b"code"

    monkeypatch.setattr(sources, "compile_to_cubin", record)
    for _ in range(2):
        build("plan.cu", "sm_90", {"IDX64": 0})
        build("plan.cu", "sm_90", {"IDX64": 1})
        build("plan.cu", "sm_100", {"IDX64": 1})
    assert len(compiled) == 3
    changed = dict(kernel_sources()) | {"common.cuh": "// another header"}
    monkeypatch.setattr(sources, "kernel_sources", lambda: changed)
    build("plan.cu", "sm_90", {"IDX64": 0})
    assert len(compiled) == 4


def test_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("EP_COMM_CACHE_DIR", str(blocker / "cache"))
    assert build("barrier.cu", "sm_90", {})[:4] == b"\x7fELF"


def test_compiler_errors_are_shown() -> None:
    message = r"broken\.cu does not compile for sm_90 with -DX=1:[\s\S]*identifier"
    with pytest.raises(KernelError, match=message):
        compile_to_cubin("broken.cu", "__global__ void f() { undefined_name(); }", {}, "sm_90", ["-DX=1"])


def test_unknown_source_is_named() -> None:
    with pytest.raises(KernelError, match=r"no kernel source named 'nothing\.cu'"):
        build("nothing.cu", "sm_90", {})


def test_launches_hand_over_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument at its natural alignment, also while another launch of the kernel is under way."""
    here, empty = torch.arange(3), torch.empty(0)
    arguments = (7, here, np.int64(-(2**40)), 1, 2, None, empty, True, np.float32(0.5), np.uint64(2**63))
    launcher = Launcher("a_kernel", 1234, arguments)
    types = (
        "c_int32",
        "c_uint64",
        "c_int64",
        "c_int32",
        "c_int32",
        "c_uint64",
        "c_uint64",
        "c_int32",
        "c_float",
        "c_uint64",
    )

    def read(packed: tuple[object, object, int]) -> list[int | float]:
        addresses = (ctypes.c_void_p * len(types)).from_address(packed[2])
        assert all(a % ctypes.sizeof(getattr(ctypes, t)) == 0 for a, t in zip(addresses, types, strict=True))
        return [getattr(ctypes, t).from_address(a).value for a, t in zip(addresses, types, strict=True)]

    expected = [7, here.data_ptr(), -(2**40), 1, 2, 0, 16, 1, 0.5, 2**63]
    first = launcher.pack(arguments)
    second = launcher.pack((8, None, *arguments[2:]))
    assert read(first) == expected and read(second) == [8, 0, *expected[2:]]
    launcher.give_back(second)
    with pytest.raises(struct.error):
        launcher.pack((2**31, *arguments[1:]))

    calls = []

    class Driver:
        def cuLaunchKernel(self, *call: object) -> int:
            calls.append(call)
            return next(statuses)

        def cuGetErrorName(self, status: int, name: object) -> int:
            return 1

    monkeypatch.setattr(driver, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: None)
    statuses = iter([0, 201, 0, 700])
    launcher.launch(5, 64, arguments, 100, 99)
    assert calls[0][:9] == (1234, 5, 1, 1, 64, 1, 1, 100, 99) and len(calls[0]) == 11
    launcher.launch(5, 64, arguments, 100, 99)
    assert len(calls) == 3, "a thread without a context gets one"
    with pytest.raises(KernelError, match=r"a_kernel failed: CUDA error 700"):
        launcher.launch(5, 64, arguments, 100, 99)
