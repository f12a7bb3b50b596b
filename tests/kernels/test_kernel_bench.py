"""The kernels' own benchmark runs and measures every kernel."""

import pytest

pytest.importorskip("headrace.kernels.cpu._ops", reason="the kernels are not built: pip install -e .")


def test_every_kernel_is_measured() -> None:
    from headrace.kernels.cpu.bench import FORMATS, measure

    results = list(measure(size=256, repeats=1))
    names = {result.kernel for result in results}
    assert {f"linear {format}" for format in FORMATS} | {"rms_norm", "paged_attention", "sample top_p"} <= names
    assert all(result.seconds > 0 and result.gb_per_s > 0 for result in results)
