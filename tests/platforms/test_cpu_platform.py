"""What the cpu platform reads of the machine, against files laid out as the kernel's documentation says."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.models.declare import declare_params
from headrace.core.ops import op_names
from headrace.core.self_test import self_test, tiny_config, tiny_spec
from headrace.core.weights.dummy import DummyParams
from headrace.core.weights.source import HostTensor, LoadedParam
from headrace.platforms.cpu.cgroup import cgroup_folders
from headrace.platforms.cpu.detect import cpu_info, has_native_bfloat16, isa_tier, usable_threads
from headrace.platforms.cpu.memory import host_memory, memory_limit

GIB = 1 << 30
V2_MOUNT = "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "30 20 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "31 20 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 20 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
X86 = (
    "processor\t: 0\nmodel name\t: Example CPU 9000\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\nmodel name\t: other\n"
)
AVX512 = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl"


def write(root: Path, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {10 * GIB // 1024} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/status": "VmRSS:\t2048 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    memory = host_memory(write(tmp_path, {}))
    assert (memory.total_bytes, memory.free_bytes, memory.used_bytes) == (16 * GIB, 10 * GIB, 2 << 20)
    assert memory_limit(tmp_path) is None


def test_version_2_takes_the_tightest_of_nested_limits(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": f"{GIB}\n",
            f"{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    memory = host_memory(tmp_path)
    assert memory.total_bytes == 4 * GIB
    assert memory.free_bytes == GIB + GIB // 2
    assert memory_limit(tmp_path) == 4 * GIB
    assert [str(folder.relative_to(tmp_path)) for folder in cgroup_folders("memory", tmp_path)] == [
        group,
        "sys/fs/cgroup/user.slice",
        "sys/fs/cgroup",
    ]


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/box"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            f"{group}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{5 * GIB}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (8 * GIB, 4 * GIB)


def test_a_container_that_sees_the_hosts_path_uses_its_mount(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/0123abc\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        },
    )
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (2 * GIB, 0)


def nested(*limits: dict[str, str]) -> dict[str, str]:
    """Files of groups of version 2, each inside the one before, and of the innermost one's process."""
    files, path = {"proc/self/mountinfo": V2_MOUNT}, ""
    for depth, limit in enumerate(limits):
        path += f"/g{depth}"
        files |= {f"sys/fs/cgroup{path}/{name}": text for name, text in limit.items()}
    return {**files, "proc/self/cgroup": f"0::{path}\n"}


@pytest.mark.parametrize(
    ("high", "maximum", "limit"),
    [
        (f"{3 * GIB}", f"{4 * GIB}", 3),
        ("max", f"{4 * GIB}", 4),
        (f"{3 * GIB}", "max", 3),
        (f"{5 * GIB}", f"{4 * GIB}", 4),
    ],
)
def test_a_group_is_throttled_above_memory_high(tmp_path: Path, high: str, maximum: str, limit: int) -> None:
    current = {"memory.current": f"{GIB}\n"}
    write(
        tmp_path, nested({"memory.max": "max\n", **current}, {"memory.high": high, "memory.max": maximum, **current})
    )
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (limit * GIB, (limit - 1) * GIB)
    assert memory_limit(tmp_path) == limit * GIB


def test_files_that_were_read_twice_are_no_used_memory(tmp_path: Path) -> None:
    """Weights that are mapped a second time become active; the kernel drops them all the same."""
    stat = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {2 * GIB}\nactive_file {4 * GIB}\n"
    write(
        tmp_path,
        nested({"memory.max": f"{8 * GIB}\n", "memory.current": f"{7 * GIB + GIB // 2}\n", "memory.stat": stat}),
    )
    assert host_memory(tmp_path).free_bytes == 6 * GIB + GIB // 2


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    write(tmp_path, nested({"memory.max": f"{64 * GIB}\n", "memory.current": "0\n"}))
    assert (host_memory(tmp_path).total_bytes, memory_limit(tmp_path)) == (16 * GIB, None)


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max cpu time              unlimited            unlimited            seconds   \n"
    "Max data size             {data:<20} unlimited            bytes     \n"
    "Max address space         {space:<20} unlimited            bytes     \n"
)


@pytest.mark.parametrize(
    ("space", "data", "total", "free"),
    [("unlimited", "unlimited", 16, 10), (4 * GIB, "unlimited", 4, 3), (4 * GIB, 3 * GIB, 3, 2.5), (GIB, GIB, 1, 0)],
)
def test_limits_of_the_process(tmp_path: Path, space: int | str, data: int | str, total: int, free: float) -> None:
    status = f"VmSize:\t{GIB // 1024} kB\nVmRSS:\t2048 kB\nVmData:\t{GIB // 2048} kB\n"
    write(tmp_path, {"proc/self/limits": LIMITS.format(space=space, data=data), "proc/self/status": status})
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.free_bytes, memory.used_bytes) == (total * GIB, free * GIB, 2 << 20)
    assert memory_limit(tmp_path) == (None if total == 16 else total * GIB)


def test_a_batch_system_limits_the_address_space() -> None:
    """`ulimit -v`: what is said to be free can be allocated, and no more."""
    program = (
        "import mmap, resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from headrace.platforms.cpu.memory import host_memory, memory_limit\n"
        "free = host_memory().free_bytes\n"
        "mmap.mmap(-1, free - (8 << 20)).close()\n"
        "try:\n    mmap.mmap(-1, free + (8 << 20))\n"
        "except OSError:\n    print('full', memory_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"full {3 << 30}\n", done.stderr


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", "/ /sys/fs/cgroup"),  # a container with a namespace of its own
        ("/../sibling", "/ /sys/fs/cgroup"),  # a process that was moved out of its namespace
        ("/kubepods/pod1/c1", "/kubepods/pod1/c1 /sys/fs/cgroup"),  # the host's namespace, its own group mounted
        ("/kubepods/pod12", "/kubepods/pod1 /sys/fs/cgroup"),  # another group is mounted
        ("/kubepods/pod1/c1", "/kubepods/pod1 /sys/fs/cgroup"),  # mounted above
        ("/", "/ /a\\040folder/cgroup"),
    ],
)
def test_containers(tmp_path: Path, path: str, mount: str) -> None:
    base = "a folder/cgroup" if "folder" in mount else "sys/fs/cgroup"
    files = {f"{base}/memory.max": f"{2 * GIB}\n", f"{base}/memory.current": f"{GIB}\n"}
    if mount.startswith("/kubepods/pod1 ") and path.endswith("c1"):
        files |= {f"{base}/c1/memory.max": f"{GIB}\n", f"{base}/c1/memory.current": "0\n"}
    files |= {f"{base}/2/memory.max": "4096\n", f"{base}/2/memory.current": "0\n"}
    root, point = mount.split(" ")
    files |= {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": f"25 20 0:22 {root} {point} rw - cgroup2 cgroup2 rw\n",
    }
    memory = host_memory(write(tmp_path, files))
    limit = 1 if "c1" in path and root == "/kubepods/pod1" else 2
    assert (memory.total_bytes, memory.free_bytes) == (limit * GIB, GIB)


def test_a_hybrid_host_takes_each_controller_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory in version 2, quotas in version 1, as systemd's hybrid mode allows."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n1:name=systemd:/box\n0::/box\n",
            "proc/self/mountinfo": "".join(V1_MOUNTS.splitlines(keepends=True)[1:]),
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/box/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/unified/box/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/unified/box/cpu.max": "100000 100000\n",  # of no controller that is there
        },
    )
    assert host_memory(tmp_path).free_bytes == 2 * GIB
    assert usable_threads(tmp_path) == 2


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [("max 100000", "200000 100000", 2), ("300000 100000", "max 100000", 3), ("10000 100000", "max 100000", 1)],
)
def test_quotas_of_nested_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str, outer: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert usable_threads(write(tmp_path, nested({"cpu.max": outer}, {}, {"cpu.max": inner}))) == expected


@pytest.mark.parametrize("text", ["", "max", "100000", "x y", "0 0", "100000 0", "-1 100000"])
def test_damaged_quotas_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert usable_threads(write(tmp_path, nested({"cpu.max": text, "memory.max": text, "memory.current": text}))) == 4


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_threads_follow_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpu.max": f"{quota}\n",
    }
    assert usable_threads(write(tmp_path, files)) == expected


def test_threads_follow_version_1_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    folder = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/\n",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{folder}/cpu.cfs_quota_us": "300000\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    assert usable_threads(write(tmp_path, files)) == 3


def test_two_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    files = {}
    for cpu, (package, core) in enumerate([(0, 0), (0, 1), (0, 0), (1, 1)]):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = f"{package}\n"
        files[f"{topology}/core_id"] = f"{core}\n"
    assert usable_threads(write(tmp_path, files)) == 3


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ("sse2", "scalar"),
        ("avx2", "scalar"),
        ("avx2 fma f16c", "avx2"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_bf16", "avx512"),
        (f"{AVX512} avx512_vnni", "avx512-vnni"),
        (f"{AVX512} avx512_bf16 avx512_vnni", "avx512-bf16+vnni"),
        (f"{AVX512} avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8", "amx"),
        ("fp asimd", "neon"),
        ("fp asimd bf16 i8mm", "neon-bf16"),
    ],
)
def test_instruction_set_tiers(flags: str, tier: str) -> None:
    assert isa_tier(set(flags.split())) == tier


def test_the_processor_is_the_first_in_cpuinfo(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": X86.format(flags=f"{AVX512} avx512_bf16 avx512_vnni")})
    info = cpu_info(tmp_path)
    assert (info.name, info.arch, info.kind) == ("Example CPU 9000", "avx512-bf16+vnni", "cpu")
    assert (info.total_bytes, info.free_bytes) == (16 * GIB, 10 * GIB)
    assert has_native_bfloat16(tmp_path)


def test_an_unknown_processor_is_still_one(tmp_path: Path) -> None:
    info = cpu_info(write(tmp_path, {"proc/cpuinfo": "CPU implementer\t: 0x41\nFeatures\t: fp asimd\n"}))
    assert info.name
    assert info.arch == "neon"
    assert not has_native_bfloat16(tmp_path)
    assert cpu_info(tmp_path / "nothing").arch == "scalar"


def test_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device=DeviceConfig(device="cpu", threads=1))
    for native, first in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("headrace.platforms.cpu.device.has_native_bfloat16", lambda native=native: native)
        assert open_device(config).caps.dtypes[0] == first


def test_threads_can_be_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        for name in ("cpu", "reference"):
            device = open_device(EngineConfig(device=DeviceConfig(device=name, threads=3)))
            assert device.describe()["threads"] == "3"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_native_kernels_run_on_the_threads_asked_for() -> None:
    kernels = pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
    before = kernels.num_threads()
    try:
        open_device(EngineConfig(device=DeviceConfig(device="cpu", threads=3)))
        assert kernels.num_threads() == 3
    finally:
        kernels.set_num_threads(before)


def test_an_isa_that_this_processor_lacks_is_refused() -> None:
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
    run = subprocess.run(
        [sys.executable, "-c", "from headrace.core.cli import main; main()", "doctor"],
        env={**os.environ, "HEADRACE_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 5 and "sse9" in run.stderr and "Traceback" not in run.stderr


def test_without_native_kernels_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.platforms.cpu.device.has_native_kernels", lambda: False)
    device = open_device(EngineConfig(device=DeviceConfig(device="cpu", threads=1)))
    assert device.caps.array == "torch"


def test_blocks_without_a_kernel_are_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
    spec = tiny_spec()
    params: list[LoadedParam] = []
    for loaded in DummyParams(declare_params(spec), seed=0, dtype="float32"):
        tensors = loaded.tensors
        if loaded.param.name.endswith("down_proj.weight"):
            rows, cols = tensors[0].shape
            data = np.zeros((rows, cols // 32 * 17), np.uint8)
            tensors = (HostTensor(name="blocks", dtype="mxfp4", shape=(rows, cols), data=data),)
        params.append(LoadedParam(param=loaded.param, tensors=tensors))
    device = open_device(EngineConfig(device=DeviceConfig(device="cpu", threads=1)))
    runner = device.runner(tiny_config(spec))
    source = DummyParams(declare_params(spec), seed=0, dtype="float32")
    monkeypatch.setattr(DummyParams, "__iter__", lambda self: iter(params))
    runner.load(source)
    runner.close()
    assert "types=mxfp4 dtype=float32" in caplog.text


def test_codes_of_iq4_nl_are_kept_as_bytes() -> None:
    """Which hold its values without loss: the products are those of the blocks as the gguf package reads them."""
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")
    import gguf

    from headrace.platforms.cpu.native.ops import native_ops
    from headrace.platforms.cpu.native.weights import packed_bytes

    random = np.random.default_rng(2)
    data = random.integers(0, 256, (20, 2 * 18), np.uint8)
    for block in range(2):
        data[:, 18 * block : 18 * block + 2] = random.normal(size=(20, 1)).astype(np.float16).view(np.uint8)
    tensor, ops = (
        HostTensor(name="weight", dtype="iq4_nl", shape=(20, 64), data=data),
        native_ops("float32", keep_blocks=True),
    )
    assert packed_bytes((32, 64), "iq4_nl") == packed_bytes((32, 64), "q8_0")
    rows = ops.embedding(np.arange(20, dtype=np.int32), ops.pack_linear([tensor], dtype="float32", device="cpu"))
    np.testing.assert_array_equal(rows, gguf.quants.dequantize(data, gguf.GGMLQuantizationType.IQ4_NL))


def test_small_float16_weights_are_numbers_in_float32() -> None:
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")
    from headrace.platforms.cpu.native.ops import native_ops

    small = np.full((3, 32), 3e-5, np.float16)  # a denormal of float16
    tensor = HostTensor(name="weight", dtype="float16", shape=small.shape, data=small)
    ops = native_ops("float32", keep_blocks=True)
    product = ops.linear(np.ones((2, 32), np.float32), ops.pack_linear([tensor], dtype="float32", device="cpu"))
    np.testing.assert_allclose(product, np.full((2, 3), 32 * float(small[0, 0])), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_of_a_file_stay_halves_under_float32(dtype: str) -> None:
    """The same bits as with weights widened to float32, in half the bytes; an explicit dtype widens."""
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")
    from headrace.kernels.cpu import _ops
    from headrace.platforms.cpu.native.weights import SCHEMES, layout_of, pack, packed_bytes

    values = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    raw = values.view(torch.uint16).numpy() if dtype == "bfloat16" else values.numpy()
    half = HostTensor(name="weight", dtype=dtype, shape=(33, 96), data=raw)
    wide = HostTensor(name="weight", dtype="float32", shape=(33, 96), data=values.float().numpy())
    assert dtype in SCHEMES
    kept, layout = pack([half], "float32", keep_blocks=True)
    assert (layout, kept.num_bytes) == (layout_of(dtype), packed_bytes((33, 96), dtype))
    widened, layout = pack([half], "float32", keep_blocks=False)
    assert layout == layout_of("float32")
    assert kept.num_bytes <= 0.6 * widened.num_bytes
    for num_tokens in (1, 5, 70):
        x = np.random.default_rng(num_tokens).standard_normal((num_tokens, 96), np.float32)
        results = []
        for weight in (kept, widened, pack([wide], "float32", keep_blocks=True)[0]):
            result = np.empty((num_tokens, 33), np.float32)
            _ops.linear(result, x, weight)
            results.append(result)
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[1], results[2])
        expected = x.astype(np.float64) @ values.double().numpy().T
        np.testing.assert_allclose(results[0], expected, atol=1e-4)


def test_doctor_names_the_ops_that_have_a_native_form() -> None:
    pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
    device = open_device(EngineConfig(device=DeviceConfig(device="cpu", threads=1)))
    runner = device.runner(tiny_config(tiny_spec()))
    served = {selection.op: selection for selection in runner.op_selections}
    assert list(served) == [name for name in op_names() if name != "store_rows"]
    assert served["linear"].provider == "native"
    assert served["encoder_attention"].provider == "native"
    assert served["place_rows"].provider == "native"
    assert {check.name: check.outcome for check in self_test(device)}["matmul"] == "passed"
