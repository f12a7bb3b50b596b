// The threads that kernels run on: one pool a process, spin-then-sleep, safe after fork.
#pragma once

#include <cstddef>
#include <functional>

#include "kernels.h"

namespace headrace {

constexpr int kMaxThreads = 1024;

int num_threads();

// Takes effect at the next parallel region. Throws std::invalid_argument outside [1, kMaxThreads].
void set_num_threads(int num_threads);

// Run `body` once on each thread, the caller being thread 0, and wait for all. Each thread has scratch of at least
// scratch_bytes (kept between calls, not zeroed). Regions of several callers run one after another; a region must
// not start another. `body` must not throw.
void parallel(std::size_t scratch_bytes, const std::function<void(const Context &)> &body);

// Parallel regions run so far.
long long num_regions();

}  // namespace headrace
