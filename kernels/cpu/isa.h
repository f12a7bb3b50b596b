// Which instruction sets this CPU and operating system offer, and which compiled tier of kernels runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

struct Tier {
    const char *name;
    const Kernels *(*kernels)();
    bool (*is_supported)();
    bool (*may_be_default)();  // false: the tier before it is faster here, or this one is an emulation, for tests
};

// All compiled tiers, slowest first.
const std::vector<Tier> &compiled_tiers();

// The tier in use. Chosen at the first call: HEADRACE_CPU_ISA if it is set, else the best that is supported.
// Throws std::invalid_argument for an unknown tier and std::runtime_error for one that this CPU lacks.
const Tier &active_tier();

// As HEADRACE_CPU_ISA, at run time. No kernel may be running.
void set_active_tier(const std::string &name);

inline const Kernels &kernels() { return *active_tier().kernels(); }

}  // namespace headrace
