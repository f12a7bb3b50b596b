// Memory for packed weights and KV caches: anonymous, in 2 MiB pages where the system gives them.
#pragma once

#include <cstddef>
#include <memory>

namespace headrace {

constexpr std::size_t kCacheLine = 64;

// A piece of a chunk that lives as long as any of its pieces. Zeroed; 64-byte aligned.
struct Allocation {
    std::shared_ptr<void> chunk;
    char *data = nullptr;
    std::size_t num_bytes = 0;
};

// Carve from a chunk shared with other allocations, so that small weights do not waste a huge page each.
// Throws std::bad_alloc.
Allocation allocate(std::size_t num_bytes);

// How much of [data, data + num_bytes) lies in huge pages now; memory that was never touched counts as none.
// -1 if the system does not say (no /proc/self/smaps).
long long huge_page_bytes(const void *data, std::size_t num_bytes);

// Bytes of address space and of chunks now held by `allocate`.
std::size_t allocated_bytes();

}  // namespace headrace
