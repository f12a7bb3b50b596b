#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <new>

namespace headrace {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = std::size_t{64} << 20;  // address space only: untouched pages cost nothing

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

std::atomic<std::size_t> held_bytes{0};
std::mutex mutex;
std::weak_ptr<void> current;  // the chunk that small allocations are carved from
char *next = nullptr;
std::size_t left = 0;

std::shared_ptr<void> map_chunk(std::size_t num_bytes) {
    // One huge page more than needed, the ends that do not align are given back.
    const std::size_t reserved = num_bytes + kHugePage;
    void *raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    char *begin = static_cast<char *>(raw);
    char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
    if (aligned != begin) munmap(begin, static_cast<std::size_t>(aligned - begin));
    const std::size_t tail = static_cast<std::size_t>(begin + reserved - (aligned + num_bytes));
    if (tail != 0) munmap(aligned + num_bytes, tail);
#ifdef MADV_HUGEPAGE
    // Refused where the kernel has no huge pages: then small ones serve, and huge_page_bytes tells.
    (void)madvise(aligned, num_bytes, MADV_HUGEPAGE);
#endif
    held_bytes += num_bytes;
    return std::shared_ptr<void>(aligned, [num_bytes](void *data) {
        munmap(data, num_bytes);
        held_bytes -= num_bytes;
    });
}

}  // namespace

Allocation allocate(std::size_t num_bytes) {
    const std::size_t size = round_up(std::max<std::size_t>(num_bytes, 1), kCacheLine);
    if (size > SIZE_MAX / 2) throw std::bad_alloc();
    const std::lock_guard lock(mutex);
    std::shared_ptr<void> chunk = current.lock();
    if (chunk == nullptr || size > left) {
        if (size >= kChunk / 2) {
            chunk = map_chunk(round_up(size, kHugePage));
            return {chunk, static_cast<char *>(chunk.get()), num_bytes};
        }
        chunk = map_chunk(kChunk);
        current = chunk;
        next = static_cast<char *>(chunk.get());
        left = kChunk;
    }
    Allocation piece{chunk, next, num_bytes};
    next += size;
    left -= size;
    return piece;
}

long long huge_page_bytes(const void *data, std::size_t num_bytes) {
    std::FILE *file = std::fopen("/proc/self/smaps", "r");
    if (file == nullptr) return -1;
    const auto begin = reinterpret_cast<std::uintptr_t>(data), end = begin + num_bytes;
    std::uintptr_t low = 0, high = 0;
    std::size_t total = 0;
    char line[512];
    while (std::fgets(line, sizeof line, file) != nullptr) {
        std::uintptr_t a, b;
        std::size_t kib;
        if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &a, &b) == 2) {
            low = a;
            high = b;
        } else if (std::sscanf(line, "AnonHugePages: %zu kB", &kib) == 1 && low < end && begin < high) {
            // A mapping may be larger than the range: its huge pages count at most as far as they overlap.
            total += std::min<std::size_t>(kib << 10, std::min(high, end) - std::max(low, begin));
        }
    }
    std::fclose(file);
    return static_cast<long long>(total);
}

std::size_t allocated_bytes() { return held_bytes.load(); }

}  // namespace headrace
