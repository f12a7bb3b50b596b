"""The compiled module itself: choice of a tier, threads, memory, and its stub."""

import ast
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")


def child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with `ops` imported."""
    return subprocess.run(
        [sys.executable, "-c", "import headrace.kernels.cpu._ops as ops\n" + code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("tier", ops.supported_tiers())
def test_a_tier_is_forced_by_the_environment(tier: str) -> None:
    assert child("print(ops.isa())", HEADRACE_CPU_ISA=tier).stdout == f"{tier}\n"


def test_by_default_the_fastest_tier_runs() -> None:
    real = [tier for tier in ops.supported_tiers() if not tier.startswith("emulated")]
    cpuinfo = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    fastest = real[-1]
    if fastest == "avx512_bf16" and "GenuineIntel" in cpuinfo and "avx512_fp16" in cpuinfo:
        fastest = "avx512_vnni"  # since Sapphire Rapids dot products of bf16 are slower than multiply-adds of floats
    assert child("print(ops.isa())", HEADRACE_CPU_ISA="").stdout == f"{fastest}\n"


def test_an_unknown_tier_is_an_error_of_the_first_kernel() -> None:
    code = "import numpy as n; x = n.zeros((1, 4), n.float32); ops.rms_norm(x, x, None, 0.1)"
    result = child(code, HEADRACE_CPU_ISA="avx3")
    assert result.returncode == 1
    assert "ValueError: HEADRACE_CPU_ISA names an unknown tier 'avx3'; this build has: scalar" in result.stderr


def test_a_tier_that_this_cpu_lacks_is_an_error() -> None:
    missing = [tier for tier in ops.compiled_tiers() if tier not in ops.supported_tiers()]
    if not missing:
        pytest.skip("this CPU has every tier")
    result = child("ops.isa()", HEADRACE_CPU_ISA=missing[0])
    assert result.returncode == 1
    assert f"RuntimeError: HEADRACE_CPU_ISA asks for kernels of tier '{missing[0]}', but this CPU" in result.stderr
    with pytest.raises(RuntimeError, match="it can run: scalar"):
        ops.set_isa(missing[0])


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_bad_numbers_of_threads(count: int) -> None:
    with pytest.raises(ValueError, match="must be between 1 and 1024"):
        ops.set_num_threads(count)


def norm(tokens: int = 64) -> None:
    x = np.ones((tokens, 64), np.float32)
    ops.rms_norm(np.empty_like(x), x, None, 0.0)


def test_threads_follow_the_number_that_is_asked() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    ops.set_num_threads(1)
    norm()
    before = count()
    ops.set_num_threads(4)
    norm()
    assert count() == before + 3
    ops.set_num_threads(1)
    norm()
    assert count() == before


def test_idle_threads_sleep() -> None:
    ops.set_num_threads(4)
    norm()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_many_callers_and_many_regions() -> None:
    ops.set_num_threads(3)
    failures: list[str] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((5, 96)).astype(np.float32)
        expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True))
        out = np.empty_like(x)
        for _ in range(300):
            out[:] = 0
            ops.rms_norm(out, x, None, 0.0)
            if not np.allclose(out, expected, rtol=1e-5):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def save_nodes(folder: Path, **cpus: str) -> Path:
    """Nodes of memory as Linux describes them; cpus: lists by node, "0-3,8"."""
    (folder / "online").write_text(",".join(name.removeprefix("node") for name in cpus) + "\n")
    for name, listed in cpus.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(f"{listed}\n")
    return folder


def test_nodes_of_memory(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert sorted(sum(ops.numa_nodes(), [])) in ([], mine)
    first, last = mine[0], mine[-1]
    folder = save_nodes(
        tmp_path, node0=f"{first}", node2="", node3=f"8000-8003,{first}-{last}", node4="8004", node5="x"
    )
    code = "ops.set_numa_folder({!r}); print(ops.numa_nodes())"
    assert child(code.format(str(folder))).stdout == f"{[[first], mine]}\n"
    assert child(code.format(str(tmp_path / "nowhere"))).stdout == "[]\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is one node")
def test_threads_and_weights_keep_to_their_nodes(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    save_nodes(tmp_path, node0=f"{first}", node1=f"{second}")
    code = f"""
import os
import numpy as np

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
ops.set_numa_folder({str(tmp_path)!r})
ops.set_num_threads(4)
held = resident()
weight = ops.PackedWeight("float32", 4096, 4096)
print(resident() - held > 60 * 2**20)
workers = sorted(set(os.listdir("/proc/self/task")) - before[1], key=int)
print([sorted(os.sched_getaffinity(int(worker))) for worker in workers])
weight.write_dense(0, np.eye(4096, dtype=np.float32))
x, out = np.random.default_rng(0).standard_normal((7, 4096)).astype(np.float32), np.empty((7, 4096), np.float32)
ops.linear(out, x, weight)
print((out == x).all(), os.sched_getaffinity(0) == before[0])
cache = ops.KVCache(64, 16, 2, 64, "float32")
"""
    assert child(code).stdout.splitlines() == ["True", f"{[[first], [second], [second]]}", "True True"]


def test_kernels_run_in_a_child_of_fork() -> None:
    code = """
import os, warnings, numpy as n
warnings.simplefilter("ignore")
ops.set_num_threads(3)
x = n.ones((8, 4), n.float32)
ops.rms_norm(n.empty_like(x), x, None, 0.0)
if os.fork() == 0:
    y = n.zeros_like(x)
    ops.rms_norm(y, x, None, 0.0)
    os._exit(0 if (y == 1).all() else 1)
print(os.wait()[1])
"""
    assert child(code).stdout == "0\n"


def test_memory_comes_back_and_lies_in_huge_pages() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    gc.collect()
    before = ops.allocated_bytes()
    weight = ops.PackedWeight("float32", 2048, 4096)
    weight.write_dense(0, np.ones((2048, 4096), np.float32))
    assert ops.allocated_bytes() - before >= weight.num_bytes
    if mode.exists() and "[never]" not in mode.read_text():
        assert weight.huge_page_bytes > 0.9 * weight.num_bytes
    del weight
    assert ops.allocated_bytes() == before


def test_too_much_memory_is_an_error() -> None:
    with pytest.raises(MemoryError):
        ops.PackedWeight("float32", 2**31 - 1, 2**31 - 1)
    with pytest.raises(MemoryError):
        ops.PackedWeight("float32", 2**24, 2**20)
    with pytest.raises(MemoryError):
        ops.KVCache(2**31, 16, 2**20, 128, "float32")


def test_the_stub_names_what_the_module_has() -> None:
    import headrace.kernels.cpu

    stub = Path(headrace.kernels.cpu.__file__).with_name("_ops.pyi")
    declared = {
        node.name: node
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    constants = {
        node.target.id
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.value
    }
    assert set(declared) | constants == {name for name in dir(ops) if not name.startswith("_")}
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            members = {member.name for member in node.body if isinstance(member, ast.FunctionDef)} - {"__init__"}
            assert members == {member for member in dir(getattr(ops, name)) if not member.startswith("_")}
        else:
            parameters = [argument.arg for argument in node.args.args]
            signature = getattr(ops, name).__nb_signature__[0][0]
            assert [part for part in parameters if f"{part}: " not in signature] == []
